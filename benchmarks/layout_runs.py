"""Small trainings in any layout: processes of this machine that train one case after another over gloo.

`run_all` starts them and returns what each case computed, whole tensors by global name. A rank of them is

    python benchmarks/layout_runs.py FOLDER         with the environment variable RANK
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from idle_observer import IdleObserver

_ROOT = Path(__file__).parents[1]
_TINY = [
    *("training=fast", "model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=128"),
    *("model.num_attention_heads=4", "model.num_query_groups=2", "model.head_dim=32"),
    *("training.seq_length=64", "training.micro_batch_size=1", "training.global_batch_size=2"),
    *("training.iterations=1", "training.warmup_iterations=0", "model.init_std=0.1"),
    *("training.distributed_optimizer=false", "capture=off", "launcher.num_threads=1"),
    *("training.lr=0.001", "training.min_lr=0.0001"),
]


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
            command = [sys.executable, "-W", "ignore", __file__, str(folder)]
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


def train_rank(folder: Path) -> None:
    """One rank of `run_all`: trains each case that it has a part in, those of many ranks first."""
    rank = int(os.environ["RANK"])
    os.environ["MASTER_ADDR"], os.environ["LOCAL_RANK"] = "127.0.0.1", str(rank)
    cases = [path for path in folder.iterdir() if path.is_dir() and rank < _processes(path)]
    for case in sorted(cases, key=lambda path: (-_processes(path), int(path.name))):
        try:
            with _rendezvous(case, rank), _planted((case / "plant").read_text()):
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


@contextlib.contextmanager
def _rendezvous(case: Path, rank: int) -> Iterator[None]:
    """Host the ranks' store in rank 0, at a port that the system chooses; every rank connects to it.

    A port chosen first and opened later could be taken in between.
    """
    from quantexp.formats.torch_internals import TCPStore

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if rank != 0:
        os.environ["MASTER_PORT"] = _announced_port(case)
        yield
        return
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["MASTER_PORT"] = str(store.port)
    (case / "port.part").write_text(str(store.port))
    (case / "port.part").rename(case / "port")
    yield


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
    from quantexp.data.prepared import tokenizer_of
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
        with contextlib.closing(saver):
            train(experiment, batches.train, observer, device, saver=saver)
        observer.store()


class _Observer(IdleObserver):
    """Keeps the first step's gradients and the last weights of a rank's parameters."""

    def __init__(self, experiment: Any, rank: int, folder: Path) -> None:
        self.experiment, self.rank, self.folder = experiment, rank, folder
        self.metrics: list[dict[str, float]] = []
        self.gradients_of: dict[str, Any] = {}

    def built(self, chunks: list[Any]) -> None:
        self.chunks = chunks

    def outside_products(self, watch: Any, stepped: bool) -> None:
        """Fail unless what was rounded outside of products is what was declared."""
        from quantexp.proof.outside_products import merged_state
        from quantexp.training.megatron.collectives import gather

        if failures := merged_state(gather(watch.verdict())).failures:
            raise RuntimeError(failures[0])

    def updated(self, iteration: int, used: Any, wrong: list[str]) -> None:
        """Fail if the optimizer's step was wrong on any rank."""
        from quantexp.training.megatron.collectives import gather

        if failures := [words for each in gather(wrong) for words in each]:
            raise RuntimeError(failures[0])

    def needs_gradients(self, iteration: int) -> bool:
        return True

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        if iteration == 1:
            self.gradients_of = self._parts(lambda p: p.main_grad)

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


if __name__ == "__main__":
    train_rank(Path(sys.argv[1]))
