"""What storing full tensors costs: beside torch.save in the hooks, and beside the disk's own rate.

    python benchmarks/capture_store.py [--repeats 3] [--periods 4] [--gb 6] [--only steps|sustained]

Everything is written below TMPDIR, which says which disk is measured.

steps: every sixth iteration of a run is captured whole, and fits in the queue. What a capture adds is what its step and
the four after it take beyond as many resting steps; a step before a capture rests, since the writer has nothing left to
do, and of these the run's median counts. What is written in the background is counted where it slows down training.
`synchronous` is the same run with torch.save where the tensor passes, and nothing else: no statistics, no copy, no
hash, no list. `capture=off` shows what a resting step takes where nothing is ever captured, and what a capture seems
to add where there is none.

sustained: tensors of a layer's sizes are put into a store as fast as it takes them, and forced to the disk at the end
(fsync); by turns with one file of the same size, written in pieces of 16 MiB and forced to the disk in the same way,
through the system's cache and past it, of which the quicker counts; and with as many files as there are tensors,
written past the cache by a program that does nothing else, which is what the disk has for files.
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from capture import MODEL, run, run_here

PERIOD = 6
CASES = {
    "synchronous torch.save": ["capture=tensors"],
    "capture.store=pt": ["capture=tensors", "capture.store=pt"],
    "capture.store=safetensors": ["capture=tensors", "capture.store=safetensors"],
    "capture=stats": ["capture=stats"],
    "capture=off": ["capture=off"],
}
#: Beside the statistics' benchmark: a capture is to fit in the queue many times over.
SMALLER = ["model.num_layers=2", "training.global_batch_size=2"]
#: Shapes of a linear layer's and an attention's tensors, bfloat16.
SHAPES = [(512, 1, 768), (512, 1, 4096), (512, 1, 2048), (512, 1, 768), (512, 12, 64), (512, 4, 64)]


def save_in_the_hooks() -> None:
    """From now on a captured tensor is saved where it passes, and no more."""
    import torch

    from quantexp.capture import recorder
    from quantexp.capture.statistics import Summary
    from quantexp.capture.store import CaptureStore, Stored

    def add(self: Any, name: str, tensor: Any, metadata: dict[str, Any]) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"tensor": tensor.detach(), "metadata": metadata}, path)
        self.last = Stored(tensor.nbytes, {"file": name})
        self.num_bytes += tensor.nbytes

    none = Summary(0, torch.empty(0))

    def nothing(*_: Any) -> None:
        return None

    CaptureStore.add = add  # type: ignore[method-assign]
    CaptureStore.refer = CaptureStore.add_statistics = nothing  # type: ignore[method-assign]
    recorder.summarise = recorder.deferred = lambda *_: none  # type: ignore[assignment]


def added(times: list[float]) -> tuple[float, float]:
    """What a capture adds and what a step takes without one, seconds; the first period warms up."""
    captures = range(2 * PERIOD - 1, len(times) - PERIOD + 1, PERIOD)
    # Iteration 2 PERIOD is captured (index 2 PERIOD - 1); the one before the next capture rests.
    rest = statistics.median(times[i + PERIOD - 1] for i in captures)
    extra = [sum(times[i : i + PERIOD - 1]) - (PERIOD - 1) * rest for i in captures]
    return statistics.median(extra), rest


def steps(repeats: int, periods: int) -> None:
    """What capturing adds, each case in a process of its own, by turns."""
    iterations = (periods + 2) * PERIOD - 1
    found: dict[str, list[float]] = {}
    for turn in range(repeats):
        for name, more in CASES.items():
            words = [*MODEL, *SMALLER, f"training.iterations={iterations}"]
            words += [f"capture.every={PERIOD}", "capture.collect_micro_batches=0", *more]
            result = run(__file__, name, *words)
            each = result.get("num_bytes", 0) / (iterations // PERIOD) / 1e9
            extra, rest = added(result["wall"])
            found.setdefault(name, []).append(extra)
            _say(
                f"{turn + 1}: {name}: {extra:+.3f} s a capture of {each:.2f} GB, a resting step {rest:.3f} s; "
                f"load {os.getloadavg()[0]:.1f}"
            )
    base = statistics.median(found["synchronous torch.save"])
    for name, values in found.items():
        value = statistics.median(values)
        _say(f"{name}: median {value:.3f} s, {value / base:.2f} of synchronous")


def sustained(repeats: int, num_bytes: float, root: Path) -> None:
    """Bytes a second into each store, beside the disk's own."""
    from quantexp.schema import StoreKind

    found: dict[str, list[float]] = {}
    for turn in range(repeats):
        for kind in StoreKind:
            disk = _disk_rate(num_bytes, root)
            rate, peak = _store_rate(kind, num_bytes, root)
            found.setdefault(kind.value, []).append(rate / disk)
            files = _rate_of_files(num_bytes, root)
            _say(
                f"{turn + 1}: {kind.value}: {rate / 1e9:.3f} GB/s, the disk {disk / 1e9:.3f} GB/s, ratio "
                f"{rate / disk:.2f}; nothing but files {files / 1e9:.3f} GB/s, ratio {rate / files:.2f}; "
                f"at most {peak / 1e9:.2f} GB waited; load {os.getloadavg()[0]:.1f}"
            )
    for name, values in found.items():
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


def _rate_of_files(num_bytes: float, root: Path) -> float:
    """Files of the tensors' sizes, each created, written past the cache in one write, and renamed."""
    folder = Path(tempfile.mkdtemp(dir=root))
    pieces = [mmap.mmap(-1, 2 * math.prod(shape)) for shape in SHAPES]
    for piece in pieces:
        piece.write(os.urandom(len(piece)))
    start, written, number = time.perf_counter(), 0, 0
    while written < num_bytes:
        path = folder / f"{number}.part"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        written += os.write(descriptor, pieces[number % len(pieces)])
        os.close(descriptor)
        path.rename(path.with_suffix(".pt"))
        number += 1
    _force(folder)
    rate = written / (time.perf_counter() - start)
    shutil.rmtree(folder)
    return rate


def _store_rate(kind: Any, num_bytes: float, root: Path) -> tuple[float, int]:
    import torch

    from quantexp.capture.store import CaptureStore

    folder = Path(tempfile.mkdtemp(dir=root))
    tensors = [torch.randn(shape).bfloat16() for shape in SHAPES]
    start, number = time.perf_counter(), 0
    store = CaptureStore(folder, queue_bytes=10**9, kind=kind)
    while store.num_bytes < num_bytes:
        x = tensors[number % len(tensors)]
        store.add(f"bf16/{number}.pt", x, {"shape": list(x.shape), "dtype": "bfloat16"})
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
    parser.add_argument("--periods", type=int, default=4, help="captures a run, after the first")
    parser.add_argument("--gb", type=float, default=6.0, help="written for each rate, 1e9 bytes")
    parser.add_argument("--only", choices=["steps", "sustained"])
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        if arguments.run[0].startswith("synchronous"):
            save_in_the_hooks()
        run_here(arguments.run[1:])
        return
    _say(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    )
    if arguments.only != "sustained":
        steps(arguments.repeats, arguments.periods)
    if arguments.only != "steps":
        with tempfile.TemporaryDirectory() as root:
            sustained(arguments.repeats, arguments.gb * 1e9, Path(root))


if __name__ == "__main__":
    main()
