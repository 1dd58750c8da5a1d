"""What storing full tensors costs: beside torch.save in the hooks, and beside the disk's own rate.

    python benchmarks/capture_store.py [--repeats 3] [--periods 8] [--gb 6] [--layer small|llama32-1b]
                                        [--only steps|sustained]

Everything is written below TMPDIR, which says which disk is measured. OMP_NUM_THREADS=1 leaves the other cores free.

steps: every fifth iteration of a run is captured, all of it fits in the queue, and in each run the ways of capturing
take turns, in another order each time: `torch.save` where a tensor passes and nothing else (no statistics, no copy, no
hash, no list), the store, and nothing at all, which shows the error of such a measurement. What a capture adds is what
its step and the two after it take beyond as many resting steps. In the step after those, which counts nowhere, what
the system still holds back is written (sync), so that no way pays for another's: that much of `torch.save` is not
counted. The step before a capture rests, and of these the run's median counts. What is written in the background is
counted where it slows down training. Of a way's captures the middle three fifths are averaged: other programs make
some steps several times as long. A run without any capture shows what a step takes where there is no background.

sustained: tensors of a layer's sizes are put into a store as fast as it takes them, and forced to the disk at the end
(fsync); by turns with one file of the same size, written in pieces of 16 MiB and forced to the disk in the same way,
through the system's cache and past it, of which the quicker counts.
"""

from __future__ import annotations

import argparse
import itertools
import math
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capture_steps import MODEL, run, run_here

PERIOD = 5
#: Steps from a captured one on that are held against resting ones; in the next the disk is brought to rest.
COUNTED = 3
SAVED, STORED, NOTHING = "torch.save in the hooks", "as configured", "nothing captured"
#: What is configured, and the ways that take turns.
CASES = {
    "capture.store=pt": (["capture=tensors", "capture.store=pt"], (SAVED, STORED, NOTHING)),
    "capture.store=safetensors": (
        ["capture=tensors", "capture.store=safetensors"],
        (SAVED, STORED, NOTHING),
    ),
    "capture=stats": (["capture=stats"], (STORED, NOTHING)),
    "capture=off": (["capture=off"], (NOTHING,)),
}
#: What is trained, beside the statistics' benchmark: a capture is to fit in the queue. A part of that model, or a layer
#: of a model with its true widths.
MODELS = {
    "small": ["model.num_layers=2", "training.global_batch_size=2"],
    "llama32-1b": [
        "model.num_layers=1",
        "model.hidden_size=2048",
        "model.ffn_hidden_size=8192",
        "model.num_attention_heads=32",
        "model.num_query_groups=8",
        "training.global_batch_size=2",
    ],
}
#: Shapes of a linear layer's and an attention's tensors, bfloat16: of the small model, and of the true one with 2,048
#: tokens.
LAYERS = {
    "small": [
        (512, 1, 768),
        (512, 1, 4096),
        (512, 1, 2048),
        (512, 1, 768),
        (512, 12, 64),
        (512, 4, 64),
    ],
    "llama32-1b": [
        (2048, 1, 2048),
        (2048, 1, 16384),
        (2048, 1, 8192),
        (2048, 1, 3072),
        (2048, 32, 64),
        (2048, 8, 64),
    ],
}
#: Wall time, and the processor time of all threads, which other programs change least.
CLOCKS = ("wall", "processor")
Shapes = Sequence[tuple[int, ...]]


def take_turns(ways: Sequence[str]) -> None:
    """From now on captures are made in these ways, by turns."""
    from quantexp.capture.record.recorder import Recorder

    begin = Recorder.begin
    use = {SAVED: _saved_in_the_hooks(), STORED: _Swap({}), NOTHING: _nothing_captured()}

    def begun(self: Recorder, iteration: int, *more: Any, **named: Any) -> None:
        if iteration % PERIOD == 0:
            for swap in use.values():
                swap.undo()
            use[way_of(iteration // PERIOD, ways)].do()
        elif iteration % PERIOD == COUNTED:
            os.sync()
        begin(self, iteration, *more, **named)

    Recorder.begin = begun  # type: ignore[method-assign]


def way_of(capture: int, ways: Sequence[str]) -> str:
    """The way of a run's captures, by their number: each round has all of them, every order comes as often."""
    orders = list(itertools.permutations(ways))
    number, place = divmod(capture, len(ways))
    return orders[number % len(orders)][place]


class _Swap:
    """Functions that stand in the place of others for a while."""

    def __init__(self, others: dict[tuple[Any, str], Any]) -> None:
        self._others = others
        self._own = {(owner, name): getattr(owner, name) for owner, name in others}

    def do(self) -> None:
        for (owner, name), function in self._others.items():
            setattr(owner, name, function)

    def undo(self) -> None:
        for (owner, name), function in self._own.items():
            setattr(owner, name, function)


def _saved_in_the_hooks() -> _Swap:
    """A captured tensor is saved where it passes, and no more."""
    import torch

    from quantexp.capture.record import recorder
    from quantexp.capture.statistics.summary import Summary
    from quantexp.capture.store.files import Stored
    from quantexp.capture.store.folder import CaptureStore

    def add(self: Any, name: str, tensor: Any, about: Any) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"tensor": tensor.detach(), "metadata": about.made()}, path)
        self.last = Stored(tensor.nbytes, {"file": name})
        self.num_bytes += tensor.nbytes

    none = Summary(0, torch.empty(0))
    return _Swap(
        {
            (CaptureStore, "add"): add,
            (CaptureStore, "refer"): _do_nothing,
            (CaptureStore, "add_statistics"): _do_nothing,
            (recorder, "summarise"): lambda *_: none,
            (recorder, "deferred"): lambda *_: none,
        }
    )


def _nothing_captured() -> _Swap:
    from quantexp.capture.record.recorder import Recorder

    return _Swap({(Recorder, "record"): _do_nothing})


def _do_nothing(*_: Any) -> None:
    """In the place of what captures."""


def added(times: list[float], ways: Sequence[str]) -> tuple[dict[str, list[float]], float]:
    """What each capture adds, by way, and what a step takes without one, seconds; the first period warms up."""
    captures = range(2 * PERIOD - 1, len(times) - PERIOD + 1, PERIOD)
    # Iteration 2 PERIOD is captured (index 2 PERIOD - 1); the one before the next capture rests.
    rest = statistics.median(times[i + PERIOD - 1] for i in captures)
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    for i in captures:
        extra = sum(times[i : i + COUNTED]) - COUNTED * rest
        ratios[way_of((i + 1) // PERIOD, ways)].append(extra)
    return ratios, rest


def steps(repeats: int, periods: int, model: Sequence[str]) -> None:
    """What capturing adds, each case in a process of its own, by turns."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for turn in range(repeats):
        for name, (more, ways) in CASES.items():
            captures = periods * len(ways)
            words = [*MODEL, *model, f"training.iterations={(captures + 2) * PERIOD - 1}"]
            words += [f"capture.every={PERIOD}", "capture.collect_micro_batches=0", *more]
            result = run(__file__, name, *words)
            for clock in CLOCKS:
                by_way, rest = added(result[clock], ways)
                _say(
                    f"{turn + 1}: {name}: {clock}: a resting step {rest:.3f} s; load {os.getloadavg()[0]:.1f}"
                )
                for way, values in by_way.items():
                    _say(
                        f"    {way}: {_summary(values)}, {_middle(values)[0] / rest:+.0%} of a step"
                    )
                    ratios.setdefault((name, clock, way), []).extend(values)
    for (name, clock, way), values in ratios.items():
        saved = ratios.get((name, clock, SAVED))
        of_saved = f", {_middle(values)[0] / _middle(saved)[0]:.2f} of torch.save" if saved else ""
        _say(f"{name}: {clock}: {way}: {_summary(values)}{of_saved}")


def _summary(values: Sequence[float]) -> str:
    mean, error = _middle(values)
    return f"{mean:+.3f} s, error {error:.3f}, {len(values)} captures"


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """The mean of the middle three fifths, and its standard error (Tukey and McLaughlin 1963: of the trimmed mean)."""
    ordered, cut = sorted(values), len(values) // 5
    kept = ordered[cut : len(ordered) - cut]
    winsorised = [*[kept[0]] * cut, *kept, *[kept[-1]] * cut]
    share = 1 - 2 * cut / len(values)
    return statistics.mean(kept), statistics.stdev(winsorised) / (share * math.sqrt(len(values)))


def sustained(repeats: int, num_bytes: float, root: Path, shapes: Shapes) -> None:
    """Bytes a second into each store, beside the disk's own."""
    from quantexp.schema import StoreKind

    ratios: dict[str, list[float]] = {}
    for turn in range(repeats):
        for kind in StoreKind:
            disk = _disk_rate(num_bytes, root)
            rate, peak = _store_rate(kind, num_bytes, root, shapes)
            ratios.setdefault(kind.value, []).append(rate / disk)
            _say(
                f"{turn + 1}: {kind.value}: {rate / 1e9:.3f} GB/s, the disk {disk / 1e9:.3f} GB/s, ratio "
                f"{rate / disk:.2f}; "
                f"at most {peak / 1e9:.2f} GB waited; load {os.getloadavg()[0]:.1f}"
            )
    for name, values in ratios.items():
        _say(f"{name}: median ratio {statistics.median(values):.2f}")


def _disk_rate(num_bytes: float, root: Path) -> float:
    """The better of what the disk takes through the system's cache and past it."""
    return max(_rate_of_one_file(num_bytes, root, flag) for flag in (0, os.O_DIRECT))


def _rate_of_one_file(num_bytes: float, root: Path, flag: int) -> float:
    path, piece = root / "disk", mmap.mmap(-1, 1 << 24)
    piece.write(os.urandom(len(piece)))
    start, written = time.perf_counter(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag)
    while written < num_bytes:
        written += os.write(descriptor, piece)
    os.fsync(descriptor)
    rate = written / (time.perf_counter() - start)
    os.close(descriptor)
    path.unlink()
    return rate


def _store_rate(kind: Any, num_bytes: float, root: Path, shapes: Shapes) -> tuple[float, int]:
    import torch

    from quantexp.capture.store.folder import CaptureStore
    from quantexp.capture.store.metadata import About

    folder = Path(tempfile.mkdtemp(dir=root))
    tensors = [torch.randn(shape).bfloat16() for shape in shapes]
    start, number = time.perf_counter(), 0
    store = CaptureStore(folder, queue_bytes=10**9, kind=kind)
    while store.num_bytes < num_bytes:
        x = tensors[number % len(tensors)]
        store.add(f"bf16/{number}.pt", x, About.of({"shape": list(x.shape), "dtype": "bfloat16"}))
        number += 1
    store.flush()
    _force(folder)
    rate = store.num_bytes / (time.perf_counter() - start)
    store.close()
    shutil.rmtree(folder)
    return rate, store.queue.peak_bytes


def _force(folder: Path) -> None:
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure by turns."""
    parser = argparse.ArgumentParser(description="What storing full tensors costs.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--periods", type=int, default=8, help="captures of each way in a run")
    parser.add_argument("--gb", type=float, default=6.0, help="written for each rate, 1e9 bytes")
    parser.add_argument(
        "--layer", choices=LAYERS, default="small", help="whose tensors are captured"
    )
    parser.add_argument("--only", choices=["steps", "sustained"])
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        take_turns(CASES[arguments.run[0]][1])
        run_here(arguments.run[1:])
        return
    _say(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    )
    if arguments.only != "sustained":
        steps(arguments.repeats, arguments.periods, MODELS[arguments.layer])
    if arguments.only != "steps":
        with tempfile.TemporaryDirectory() as root:
            sustained(arguments.repeats, arguments.gb * 1e9, Path(root), LAYERS[arguments.layer])


if __name__ == "__main__":
    main()
