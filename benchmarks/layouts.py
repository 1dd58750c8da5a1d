"""Every layout against one process: the loss, the norm and each gradient of the first step, the weights after some.

    python benchmarks/layouts.py [--models llama,deepseek] [--schemes NAME,...] [--layouts NAME,...] [--precision fp32]

Each run trains a small model (2 layers, hidden size 64, initial std 0.1) on the built-in sample, in processes of this
machine over gloo, and stores its gradients by global name. The worst relative error, |a - b| / |b| in the 2-norm of a
parameter, is what layouts are compared by; the model and the batch are the same in all of them. In fp32 the errors of a
sound layout are those of another order of sums, some 1e-7; in bf16 rounding between the layers hides an unsound one.

An element of an operand that lies within such an error of the boundary between two grid points may be rounded to the
other one. Quantised layers enlarge such a difference, to 1e-2 a few layers on. It is a matter of chance, so each layout
has three seeds. An unsound layout is unsound for every seed.

In the tables loss and norm are the largest of a row, each in its best seed; the other columns have a scheme's worst
gradient in the best seed, and in parentheses that of the worst seed, if an element changed sides there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_TINY = [
    *("training=fast", "model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=128"),
    *("model.num_attention_heads=4", "model.num_query_groups=2", "model.head_dim=32"),
    *("training.seq_length=64", "training.micro_batch_size=1", "training.global_batch_size=2"),
    *("training.iterations=1", "training.warmup_iterations=0", "model.init_std=0.1"),
    *("training.distributed_optimizer=false", "capture=off", "launcher.num_threads=1"),
    *("training.lr=0.001", "training.min_lr=0.0001"),
]
MODELS = {
    "llama": ["model=llama32-1b"],
    "llama-untied": ["model=llama31-8b"],
    "deepseek": [
        *("model=deepseek2_lite", "model.num_query_groups=4", "model.head_dim=48"),
        *("model.mla.kv_lora_rank=112", "model.mla.qk_head_dim=32"),
        *("model.mla.qk_pos_emb_head_dim=16", "model.mla.v_head_dim=32"),
        *("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=64"),
        *("model.moe.num_dense_layers=1",),
    ],
}
#: Latent attention for queries too, without experts, so that tensor parallelism without sequence parallelism exists.
MODELS["latent"] = [*MODELS["deepseek"], "model.moe=null", "model.mla.q_lora_rank=64"]
SCHEMES = [
    *("bf16", "linear_mxfp4", "FA_linear_mxfp8", "linear_hifp8", "more/FA_full_mxfp8"),
    *("more/linear_mxfp4_sr_rht", "more/linear_hifp8_delayed"),
]
_LONG = "training.seq_length=256"  # half a chunk is a Hadamard block
_DEEP = "model.num_layers=4"
#: The processes and the words of each layout.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp2": (2, []),
    "dp2 distributed optimizer": (2, ["training.distributed_optimizer=true"]),
    "tp2": (2, ["parallel.tensor=2", "parallel.sequence=false"]),
    "tp2 sp": (2, ["parallel.tensor=2"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "pp2 interleaved": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2", _DEEP]),
    "cp2": (2, ["parallel.context=2", _LONG]),
    "ep2 allgather": (2, ["parallel.expert=2"]),
    "ep2 alltoall": (2, ["parallel.expert=2", "parallel.dispatcher=alltoall"]),
    "tp2 sp ep2": (4, ["parallel.tensor=2", "parallel.expert=2"]),
    "tp2 sp ep2 alltoall": (
        4,
        ["parallel.tensor=2", "parallel.expert=2", "parallel.dispatcher=alltoall"],
    ),
    "tp2 pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "tp2 cp2": (4, ["parallel.tensor=2", "parallel.context=2", _LONG]),
    "dp2 tp2": (4, ["parallel.tensor=2"]),
}
#: Layouts that need experts, and one that experts exclude: tensor without sequence parallelism.
_WITH_EXPERTS = frozenset(name for name in LAYOUTS if "ep2" in name)
_WITHOUT_EXPERTS = frozenset({"tp2"})
#: The seeds of a table's rows.
SEEDS = (1, 2, 3)


def exists(model: str, scheme: str, layout: str) -> bool:
    """Whether a model under a scheme can have a layout."""
    if "sr_rht" in scheme and model == "deepseek" and ("tp2" in layout or "ep2" in layout):
        return (
            False  # a rank's part ends within a Hadamard block; tokens of experts draw by position
        )
    if "cp2" in layout and model == "deepseek":
        return "linear" not in scheme  # the router parts an expert's tokens otherwise
    return layout not in (_WITHOUT_EXPERTS if model == "deepseek" else _WITH_EXPERTS)


def reference(words: list[str]) -> list[str]:
    """The words of a layout that one process has, too: its sizes."""
    return [word for word in words if word.startswith(("model.", "training.seq_length"))]


@dataclass(frozen=True)
class Result:
    """What a run in a layout computed."""

    losses: list[float]
    grad_norms: list[float]
    #: By global name: the gradients of the first step; of the whole parameters.
    gradients: dict[str, Any]
    #: The weights after the last step.
    weights: dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """A layout beside one process; each number is a relative error."""

    #: Of the first step, and of the worst.
    first_loss: float
    loss: float
    #: Of the first step.
    grad_norm: float
    gradient: float
    weight: float
    #: The parameter with the worst gradient.
    worst: str


@dataclass(frozen=True)
class Case:
    """A run: its words, and the ranks it takes."""

    words: list[str]
    num_processes: int
    #: MODULE:FUNCTION of a context manager in which every rank trains, for tests that plant a fault.
    plant: str = ""


def run_all(cases: list[Case], folder: Path, timeout_s: float = 800) -> list[Result | str]:
    """Train every case, one after another, in processes of this machine that serve them all.

    The processes import everything once. A case that fails gives the end of its first failed rank's traceback.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for index, case in enumerate(cases):
        _prepare(case, folder / str(index))
    number = max(case.num_processes for case in cases)
    ranks = []
    for rank in range(number):
        with (folder / f"rank{rank}.log").open("wb") as log:
            command = [sys.executable, "-W", "ignore", __file__, "--rank-of", str(folder)]
            path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
            own = {"RANK": str(rank), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            environment = {**os.environ, **own}
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        for process in ranks:
            process.wait(timeout_s)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [_result(folder / str(index), case, folder) for index, case in enumerate(cases)]


def _prepare(case: Case, folder: Path) -> None:
    """Write the configuration of a case."""
    from quantexp.config.compose import compose
    from quantexp.config.load import save

    folder.mkdir()
    number = case.num_processes
    experiment = compose([*_TINY, *case.words, f"launcher.num_processes={number}"])
    save(experiment, folder / "config.yaml")
    (folder / "plant").write_text(case.plant)
    (folder / "processes").write_text(str(number))


def _result(folder: Path, case: Case, logs: Path) -> Result | str:
    for rank in range(case.num_processes):
        failure = folder / f"rank{rank}.txt"
        if failure.exists():
            return f"rank {rank}: {failure.read_text()[-2000:]}"
        if not (folder / f"rank{rank}.pt").exists():
            log = (logs / f"rank{rank}.log").read_text()
            return f"rank {rank} ended: {log[-2000:]}"
    return _joined(folder, case.num_processes)


def _joined(folder: Path, num_processes: int) -> Result:
    """The whole tensors, from every rank's parts."""
    import torch

    metrics = json.loads((folder / "metrics.json").read_text())
    parts = [torch.load(folder / f"rank{rank}.pt") for rank in range(num_processes)]
    whole: dict[str, dict[str, Any]] = {"gradients": {}, "weights": {}}
    for part in parts:
        for kind, tensors in whole.items():
            for name, (tensor, axis, ranges, shape) in part[kind].items():
                target = tensors.setdefault(name, torch.full(shape, torch.nan))
                if axis is None:
                    target.copy_(tensor)
                    continue
                own = tensor.split([stop - start for start, stop in ranges], dim=axis)
                for (start, stop), piece in zip(ranges, own, strict=True):
                    target.narrow(axis, start, stop - start).copy_(piece)
    return Result(
        [m["loss"] for m in metrics],
        [m["grad_norm"] for m in metrics],
        whole["gradients"],
        whole["weights"],
    )


def difference(layout: Result, one: Result) -> Difference:
    """A layout's result beside that of one process.

    Raises:
        RuntimeError: the two have different parameters, or a part of one is missing.
    """
    import torch

    def relative(a: Any, b: Any) -> float:
        a, b = a.double(), b.double()
        if torch.equal(a, b):  # both are zero for an expert without tokens
            return 0.0
        return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))

    if layout.gradients.keys() != one.gradients.keys():
        raise RuntimeError("the layouts have different parameters")
    errors = {n: relative(layout.gradients[n], one.gradients[n]) for n in one.gradients}
    if any(error != error for error in errors.values()):
        raise RuntimeError(
            f"a part of these is missing: {[n for n, e in errors.items() if e != e]}"
        )
    worst = max(errors, key=lambda name: errors[name])
    return Difference(
        abs(layout.losses[0] / one.losses[0] - 1),
        max(abs(a / b - 1) for a, b in zip(layout.losses, one.losses, strict=True)),
        abs(layout.grad_norms[0] / one.grad_norms[0] - 1),
        errors[worst],
        max(relative(layout.weights[n], one.weights[n]) for n in one.weights),
        worst,
    )


def train_rank(folder: Path) -> None:
    """One rank of `run_all`: trains each case that it has a part in, those of many ranks first."""
    rank = int(os.environ["RANK"])
    os.environ["MASTER_ADDR"], os.environ["LOCAL_RANK"] = "127.0.0.1", str(rank)
    cases = [path for path in folder.iterdir() if path.is_dir() and rank < _processes(path)]
    for case in sorted(cases, key=lambda path: (-_processes(path), int(path.name))):
        try:
            os.environ["MASTER_PORT"] = _free_port(case) if rank == 0 else _announced_port(case)
            with _planted((case / "plant").read_text()):
                _train_case(case)
        except Exception:  # noqa: BLE001
            (case / f"rank{rank}.txt").write_text(traceback.format_exc())


def _planted(name: str) -> contextlib.AbstractContextManager[None]:
    if not name:
        return contextlib.nullcontext()
    module, _, function = name.partition(":")
    plant: contextlib.AbstractContextManager[None] = getattr(
        importlib.import_module(module), function
    )()
    return plant


def _free_port(case: Path) -> str:
    """A port that was free a moment ago, which the other ranks of the case read."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (case / "port.part").write_text(port)
    (case / "port.part").rename(case / "port")
    return port


def _announced_port(case: Path, timeout_s: float = 120) -> str:
    """What rank 0 chose.

    Raises:
        RuntimeError: rank 0 did not begin in time.
    """
    end = time.monotonic() + timeout_s
    while not (case / "port").exists():
        if time.monotonic() > end:
            raise RuntimeError(f"rank 0 did not begin within {timeout_s:g} s")
        time.sleep(0.01)
    return (case / "port").read_text()


def _processes(case: Path) -> int:
    return int((case / "processes").read_text())


def _train_case(folder: Path) -> None:
    import torch

    from quantexp.config.load import read
    from quantexp.data.completed import tokenizer_of
    from quantexp.data.sample import sample_prefix
    from quantexp.folders import cache_dir
    from quantexp.model.layout import Layout
    from quantexp.runs.paths import RunDir
    from quantexp.runs.ranks import own_rank
    from quantexp.training.context import RunContext
    from quantexp.training.megatron.data_loader import rank_batches
    from quantexp.training.megatron.session import session
    from quantexp.training.megatron.trainer import train
    from quantexp.training.saver import make_saver

    torch.set_num_threads(1)
    experiment = read(folder / "config.yaml")
    processes = experiment.launcher.num_processes
    os.environ["WORLD_SIZE"] = str(processes)
    rank, dataset = own_rank(processes), experiment.dataset
    cache = cache_dir(experiment.paths.cache)
    prefixes = {sample_prefix(dataset.name, cache, str(dataset.split)): 1.0}
    with session(experiment.training, rank, 2.0, Layout.of(experiment)) as device:
        batches = rank_batches(experiment, rank, prefixes, tokenizer_of(dataset))
        observer = _Observer(experiment, rank.rank, folder)
        saver = make_saver(RunContext(RunDir(folder), experiment, rank))
        train(experiment, batches.train, observer, device, saver=saver)
        observer.store()


class _Observer:
    """Keeps the first step's gradients and the last weights of a rank's parameters."""

    unproved = False

    def __init__(self, experiment: Any, rank: int, folder: Path) -> None:
        self.experiment, self.rank, self.folder = experiment, rank, folder
        self.metrics: list[dict[str, float]] = []
        self.gradients_of: dict[str, Any] = {}

    def built(self, chunks: list[Any]) -> None:
        self.chunks = chunks

    def proof(self, iteration: int, declared: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def micro_batch(self, iteration: int, index: int, loss_scale: float | None) -> None:
        pass

    def needs_gradients(self, iteration: int) -> bool:
        return True

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        if iteration == 1:
            self.gradients_of = self._parts(lambda p: p.main_grad)

    def evaluation(self) -> None:
        pass

    def iteration(self, metrics: Any) -> bool:
        self.metrics.append({"loss": metrics.loss, "grad_norm": metrics.grad_norm})
        return True

    def store(self) -> None:
        """Write everything into the folder."""
        import torch

        weights = self._parts(lambda p: p.data)
        content = {"gradients": self.gradients_of, "weights": weights}
        torch.save(content, self.folder / f"rank{self.rank}.pt")
        if self.rank == 0:
            (self.folder / "metrics.json").write_text(json.dumps(self.metrics))

    def _parts(self, of: Any) -> dict[str, Any]:
        """Copies by global name, each with its axis, its ranges and the whole shape."""
        from quantexp.model.layout import Layout
        from quantexp.training.megatron.parameters import parts_of

        layout = Layout.of(self.experiment)
        place = layout.place(self.rank)
        parts = parts_of(self.chunks, self.experiment.model, layout, place)
        return {
            name: (
                of(part.tensor).detach().float().clone(),
                *astuple(part.shard),
                part.parameter.shape,
            )
            for name, part in parts.items()
        }


def main() -> None:
    """Print the table, or be one rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="llama,deepseek")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--words", default="", help="more overrides, with spaces between")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        train_rank(arguments.rank_of)
        return
    base = [f"training.precision={arguments.precision}", *arguments.words.split()]
    for model in arguments.models.split(","):
        table: dict[tuple[str, str, str], list[Difference | str]] = {}
        for scheme in arguments.schemes.split(","):
            names = [n for n in arguments.layouts.split(",") if exists(model, scheme, n)]
            with tempfile.TemporaryDirectory() as work:
                rows = [(model, scheme, name) for name in names]
                table |= differences(rows, Path(work), base, timeout_s=3600)
            one = {row: each for row, each in table.items() if row[1] == scheme}
            sys.stderr.write(matrix(model, one) + "\n")
        sys.stdout.write(matrix(model, table) + "\n\n")
        sys.stdout.flush()


def matrix(model: str, table: dict[tuple[str, str, str], list[Difference | str]]) -> str:
    """A model's table: a row for each layout, a column for each scheme."""
    schemes = list(dict.fromkeys(scheme for _, scheme, _ in table))
    heads = [model, "loss", "norm", *schemes]
    lines = [heads, ["---"] * len(heads)]
    for name in dict.fromkeys(name for *_, name in table):
        own = {
            scheme: table[model, scheme, name]
            for scheme in schemes
            if (model, scheme, name) in table
        }
        best = [b for by_seed in own.values() if (b := _best(by_seed)) is not None]
        worst = [
            max(getattr(b, key) for b in best) if best else float("nan")
            for key in ("first_loss", "grad_norm")
        ]
        lines.append([name, *map(_number, worst), *(_cell(own.get(scheme)) for scheme in schemes)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _best(by_seed: list[Difference | str]) -> Difference | None:
    """The seed with the smallest error; None if a seed failed."""
    sound = [each for each in by_seed if isinstance(each, Difference)]
    return min(sound, key=lambda each: each.gradient) if len(sound) == len(by_seed) else None


def _cell(by_seed: list[Difference | str] | None) -> str:
    """The worst gradient of the best seed, and of the worst seed if that is of another kind."""
    if by_seed is None:
        return ""
    if (best := _best(by_seed)) is None:
        failure = next(each for each in by_seed if isinstance(each, str))
        return f"failed: {failure.strip().splitlines()[-1]}"
    worst = max(each.gradient for each in by_seed if isinstance(each, Difference))
    return _number(best.gradient) + (f" ({_number(worst)})" if worst > 10 * best.gradient else "")


def _number(x: float) -> str:
    return f"{x:.0e}" if x else "0"


def differences(
    rows: list[tuple[str, str, str]],
    folder: Path,
    more: list[str],
    seeds: tuple[int, ...] = SEEDS,
    plants: dict[tuple[str, str, str], str] | None = None,
    timeout_s: float = 800,
) -> dict[tuple[str, str, str], list[Difference | str]]:
    """Rows of model, scheme and layout beside one process, for each seed; a failure is its message."""
    cases: dict[tuple[Any, ...], Case] = {}
    pairs: dict[tuple[str, str, str], list[tuple[Any, Any]]] = {}
    for row in rows:
        model, scheme, name = row
        number, words = LAYOUTS[name]
        for seed in seeds:
            base = [*MODELS[model], f"quant={scheme}", f"training.seed={seed}", *more]
            one = (model, scheme, seed, *reference(words))
            cases.setdefault(one, Case([*base, *reference(words)], 1))
            cases[row, seed] = Case([*base, *words], number, (plants or {}).get(row, ""))
            pairs.setdefault(row, []).append(((row, seed), one))
    results = dict(zip(cases, run_all(list(cases.values()), folder, timeout_s), strict=True))
    return {
        row: [_beside(results[own], results[one]) for own, one in keys]
        for row, keys in pairs.items()
    }


def _beside(layout: Result | str, one: Result | str) -> Difference | str:
    if isinstance(one, str):
        return f"in one process: {one}"
    return layout if isinstance(layout, str) else difference(layout, one)


if __name__ == "__main__":
    main()
