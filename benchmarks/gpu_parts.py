"""The parts of `on_gpu.py`: each has cases, each case returns rows of a table.

A case may fail or be cut off; those before it are recorded. Without a GPU the same cases run at sizes that only show
that they work.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")
Row = dict[str, Any]
Case = Callable[[], list[Row]]
#: A tiny model in place of true sizes.
_TINY = [
    *("model.num_layers=1", "model.hidden_size=64", "model.ffn_hidden_size=128"),
    *("model.num_attention_heads=4", "model.num_query_groups=2", "model.head_dim=32"),
    *("training.iterations=3", "training.warmup_iterations=0", "memory=ignore"),
]
_ATTENTIONS = ["plain", "fused", "tiled"]
_STATISTICS = "capture=stats"


class CaseFailedError(Exception):
    """A case whose rows show what is wrong."""

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class Setting:
    """Where a part runs."""

    device: str
    #: For run folders and whatever else a case writes.
    folder: Path

    def pick(self, on_gpu: T, on_cpu: T) -> T:
        """A size for the device."""
        return on_gpu if self.device == "cuda" else on_cpu

    def long_runs(self) -> list[str]:
        """Words of runs at true width with 4096 tokens."""
        words = [
            *("training=fast", "training.seq_length=4096", "training.micro_batch_size=1"),
            *("training.global_batch_size=1", "analysis.auto=false", f"paths.root={self.folder}"),
        ]
        return words + self.pick([], [*_TINY, "training.seq_length=64"])


@dataclass(frozen=True)
class Part:
    """Cases that belong together, in a process of their own."""

    name: str
    title: str
    cases: Callable[[Setting], Iterator[tuple[str, Case]]]
    #: A part that takes longer is ended.
    limit_s: float = 150.0
    #: For its process, without a GPU.
    environment: dict[str, str] = field(default_factory=dict)


def commands(setting: Setting) -> Iterator[tuple[str, Case]]:
    """Runs by the public command: the README's main one, then true width and depth with 4096 tokens."""
    main = ["training=fast", f"paths.root={setting.folder}", *setting.pick([], _TINY)]
    deep = [*setting.long_runs(), "capture=off"]
    deep += setting.pick(["model.num_layers=16"], [])
    cases = {
        "the README's main command": ["quant=FA_linear_mxfp8", *main],
        "the same in bf16": ["quant=bf16", *main],
        "bf16, 16 layers, 4096 tokens": ["quant=bf16", *deep],
        "FA_linear_mxfp8, 16 layers, 4096 tokens": ["quant=FA_linear_mxfp8", *deep],
    }
    for name, words in cases.items():
        yield name, lambda words=words: [_by_command(words)]  # type: ignore[misc]


def schemes(setting: Setting) -> Iterator[tuple[str, Case]]:
    """The ten schemes, in one process."""
    from quantexp.quant.scheme import SCHEMES

    words = [*setting.long_runs(), "capture=off", "training.iterations=4"]
    for scheme in SCHEMES:
        yield scheme, lambda scheme=scheme: [_in_process([*words, f"quant={scheme}"])]  # type: ignore[misc]


def _by_command(words: list[str]) -> Row:
    from quantexp.config.compose import compose

    start = time.perf_counter()
    command = [sys.executable, "-m", "quantexp", "model=llama32-1b", "dataset=wikipedia", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    sys.stdout.write(done.stdout)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-3000:]}")
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)
    run = Path(lines["run"])
    run = run if run.is_absolute() else Path.cwd() / run
    return {**_measures(run, compose(["model=llama32-1b", *words])), "seconds": seconds}


def _in_process(words: list[str]) -> Row:
    import torch

    from quantexp.config.compose import compose
    from quantexp.launch.attempt import open_run
    from quantexp.runs.device import device_class
    from quantexp.training.worker import Worker

    gc.collect()  # the model and the optimizer of an earlier run are in reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    experiment = compose(["model=llama32-1b", *words])
    with open_run(experiment, device_class(experiment.launcher), ["on_gpu.py"]) as (opened, _):
        code = Worker(opened.run, experiment).run()
    if code:
        raise RuntimeError(
            f"exit code {code}: {json.loads(opened.run.status.read_text())['reason']}"
        )
    return {**_measures(opened.run.root, experiment), "seconds": time.perf_counter() - start}


def _measures(run: Path, experiment: Any) -> Row:
    """What a run recorded, beside what `plan` says of its memory; on a CPU the whole resident set."""
    from quantexp.cli.plan_record import make_plan
    from quantexp.launch.progress import proof_line

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    proof = json.loads((run / "precision.json").read_text())
    last = metrics[-1]
    predicted = make_plan(experiment).memory_gb_per_gpu
    return {
        "iteration": last["iteration"],
        "loss": last["loss"],
        "proof": proof_line(proof, experiment.training.precision),
        "s a step": min(each["step_time_s"] for each in metrics),
        "tokens/s": max(each["tokens_per_s"] for each in metrics),
        "MFU": max(each["mfu"] or 0.0 for each in metrics),
        "peak GB": last["memory_gb"],
        "planned GB": predicted,
        "of plan": last["memory_gb"] / predicted,
    }


def verify(setting: Setting) -> Iterator[tuple[str, Case]]:
    """All formats, kernel by kernel, against the exact gold and other libraries."""
    formats = setting.pick([], ["--formats", "mxfp4"])
    words = ["verify", "--json", "--device", setting.device, *formats]

    def verified() -> list[Row]:
        command = [sys.executable, "-m", "quantexp", *words, f"paths.cache={setting.folder}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        rows = json.loads(done.stdout)["rows"]
        names = ("format", "kernel", "oracle", "cases", "mismatches", "examples")
        shown = [{name: row[name] for name in names if row[name]} for row in rows]
        if done.returncode:
            raise CaseFailedError("values differ", shown)
        return shown

    yield "every format", verified


def tests(setting: Setting) -> Iterator[tuple[str, Case]]:
    """The tests that need a GPU, file by file, as a file that is cut off leaves no report."""
    files = [f for f in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in f.read_text()]
    for file in sorted(files, key=lambda file: file.stat().st_size):
        name = str(file.relative_to(ROOT))
        yield name, partial(_tests, name, setting.folder / "junit.xml")


def _tests(file: str, report: Path) -> list[Row]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    report.unlink(missing_ok=True)
    subprocess.run([*command, f"--junitxml={report}", file], cwd=ROOT, check=False)
    cases = list(ElementTree.parse(report).iter("testcase"))
    results = {"passed": 0, "skipped": 0, "failed": 0}
    failures = []
    for case in cases:
        ends = {child.tag: child for child in case}
        problem = ends.get("failure", ends.get("error"))
        results["skipped" if "skipped" in ends else "passed" if problem is None else "failed"] += 1
        if problem is not None:
            name = f"{case.get('classname')}::{case.get('name')}"
            failures.append({"test": name, "message": (problem.text or "")[-2000:]})
    rows: list[Row] = [{"test": "all", **results}, *failures]
    if failures:
        raise CaseFailedError(f"{len(failures)} tests failed", rows)
    return rows


def quantising(setting: Setting) -> Iterator[tuple[str, Case]]:
    """Each format and axis beside copy_ of the same tensors; then beside others."""
    import quantise_gpu as program
    import torch

    shapes = setting.pick([(8192, 8192), (4096, 14336), (1, 131072)], [(64, 64), (1, 128)])
    repeats = setting.pick(30, 1)
    peers: list[tuple[str, ...]] = [(), ("eager",), *setting.pick([("torchao",), ("compile",)], [])]
    for others, shape, dtype in itertools.product(peers, shapes, ("bfloat16", "float32")):
        if others and (shape, dtype) != (shapes[0], "bfloat16"):
            continue

        def measured(others: Any = others, shape: Any = shape, dtype: str = dtype) -> list[Row]:
            tensors = program.Tensors(shape, getattr(torch, dtype), setting.device)
            program.compare(tensors)
            cases = program.cases_of(tensors, others)
            return program.rows(cases, tensors, repeats, setting.device)

        beside = f", beside {', '.join(others)}" if others else ""
        yield f"{shape[0]} x {shape[1]} {dtype}{beside}", measured


def steps(setting: Setting) -> Iterator[tuple[str, Case]]:
    """Forward and backward of Llama 3.2 1B beside Megatron-Core's own classes."""
    schemes = ["bf16", "linear_mxfp8", "FA_linear_mxfp8", "more/FA_full_mxfp8"]
    plain = [f"quant={scheme}" for scheme in schemes]
    ways = [f"quant=bf16 training.attention={way}" for way in _ATTENTIONS]
    ways += ["quant=FA_linear_mxfp8 training.attention=fused"]
    ways += ["quant=more/FA_full_mxfp8 training.attention=tiled"]
    for layers, words in itertools.product(setting.pick([4, 16], [1]), (plain, ways)):
        T = setting.pick(4096, 64)
        name = f"{layers} layers, {T} tokens, {'schemes' if words is plain else 'attention'}"
        yield name, lambda layers=layers, T=T, words=words: _steps(layers, T, words, setting)  # type: ignore[misc]


def _steps(layers: int, tokens: int, words: list[str], setting: Setting) -> list[Row]:
    import steps as program
    import torch

    from quantexp.config.compose import compose
    from quantexp.quant.step_state import StepState, use_step_state
    from quantexp.training.megatron.session import session

    arguments = argparse.Namespace(
        layers=layers,
        tokens=tokens,
        micro_batches=1,
        attention="plain",
        repeats=setting.pick(10, 1),
    )
    with session(compose(["training=fast"]).training), use_step_state(StepState(1)):
        rows = program.rows(*program.results(arguments, words))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows


def attention(setting: Setting) -> Iterator[tuple[str, Case]]:
    """Each way to multiply an attention, from 1,024 to 16,384 tokens."""
    import attention_gpu as program

    sizes = setting.pick([1024, 4096, 16384], [64])
    for tokens, scheme in itertools.product(sizes, ["bf16", "FA_mxfp8", "mxfp8", "hifp8"]):
        arguments = argparse.Namespace(
            tokens=tokens,
            heads=setting.pick(32, 2),
            groups=setting.pick(8, 1),
            dtype="bfloat16",
            repeats=setting.pick(10, 1),
            device=setting.device,
        )

        def measured(scheme: str = scheme, arguments: Any = arguments) -> list[Row]:
            with program.on(setting.device):
                rows = program.rows(scheme, setting.pick("64", "32"), arguments)
            return [{"tokens": arguments.tokens, **row} for row in rows]

        yield f"{scheme}, {tokens} tokens", measured


def captures(setting: Setting) -> Iterator[tuple[str, Case]]:
    """Steps with captures beside steps without, and how long a checkpoint holds up a step."""
    import capture_steps
    import saving

    words = [*setting.long_runs(), "model.num_layers=4", "training.warmup_iterations=1"]
    words = [word for word in words if not word.startswith("paths.root=")]
    blocks = setting.pick(6, 4)
    for capture in (_STATISTICS, f"{_STATISTICS} capture.format=mxfp8", "capture=tensors"):
        yield (
            capture,
            lambda capture=capture: [  # type: ignore[misc]
                capture_steps.measured([*words, *capture.split()], blocks)
            ],
        )
    yield "checkpoints", lambda: [saving.results([], setting.pick(10, 3))]


def experiment(setting: Setting) -> Iterator[tuple[str, Case]]:
    """`mxfp8_tracks_bf16` at `size=full`, one seed, cut to 60 steps of 16,384 tokens of the synthetic language."""
    words = ["+size=full", "dataset=synthetic", "capture=off", "analysis.auto=false"]
    words += [f"paths.root={setting.folder}", "training.global_batch_size=8"]
    cut = ["training.iterations=60", "training.warmup_iterations=10"]
    words += setting.pick(cut, [*_TINY, "training.seq_length=64"])
    for scheme in ("bf16", "linear_mxfp8"):
        yield scheme, lambda scheme=scheme: [_in_process([*words, f"quant={scheme}"])]  # type: ignore[misc]


def transformer_engine(setting: Setting) -> Iterator[tuple[str, Case]]:
    """Its quantizers against the schemes' formats, and runs by its recipes; one row that says so where it is absent."""
    from quantexp.errors import QuantexpError
    from quantexp.training.megatron.without_te import require_te

    try:
        require_te("this part")
    except QuantexpError as error:
        reason = str(error)
        yield "absent", lambda: [{"absent": reason}]
        return

    def ran(scheme: str) -> list[Row]:
        try:
            _require_recipes([*words, f"quant=more/{scheme}"])
            return [_in_process([*words, f"quant=more/{scheme}"])]
        except QuantexpError as error:  # this GPU, or this version, cannot
            return [{"refused": str(error)}]

    yield "verify --backend transformer_engine", _verified_backend
    words = [*setting.long_runs(), "capture=off", "training.iterations=4"]
    recipes = ("fp8_current", "fp8_delayed", "fp8_blockwise", "mxfp8", "mxfp8_hybrid", "nvfp4")
    for scheme in (f"te_{recipe}" for recipe in recipes):
        yield scheme, partial(ran, scheme)


def _require_recipes(words: list[str]) -> None:
    """Raise a RunError unless Transformer Engine runs the recipes of a scheme here; a run would only record it."""
    from quantexp.config.compose import compose
    from quantexp.extras.transformer_engine.rank.support import require_support
    from quantexp.extras.transformer_engine.scheme.assignment import assignments
    from quantexp.quant.precision import precision_map

    experiment = compose(["model=llama32-1b", *words])
    for each in assignments(experiment, precision_map(experiment.model, experiment.quant, 1)):
        if each.recipe is not None:
            require_support(each.recipe)


def _verified_backend() -> list[Row]:
    command = [sys.executable, "-m", "quantexp", "verify", "--backend", "transformer_engine"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(done.stderr)
    result = json.loads(done.stdout)
    rows = [{name: value for name, value in row.items() if value} for row in result["rows"]]
    rows += [{"recipe": recipe, "absent": why} for recipe, why in result["absent"].items()]
    if done.returncode:
        raise CaseFailedError("bytes differ", rows)
    return rows


PARTS = [
    Part("commands", "Runs by the public command", commands),
    Part("schemes", "The ten schemes, 4096 tokens", schemes),
    Part("verify", "quantexp verify", verify, environment={"OMP_NUM_THREADS": "2"}),
    Part("transformer_engine", "Transformer Engine", transformer_engine),
    Part("tests", "Tests that need a GPU", tests),
    Part("quantising", "Quantising", quantising, environment={"TRITON_INTERPRET": "1"}),
    Part("steps", "Steps of Llama 3.2 1B", steps),
    Part("attention", "Attention", attention, environment={"TRITON_INTERPRET": "1"}),
    Part("captures", "Captures and checkpoints", captures),
    Part("experiment", "An experiment at full size, cut to 60 steps", experiment, 200.0),
]
