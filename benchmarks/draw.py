"""`quantexp draw` on a large collection, beside a plain script with numpy and matplotlib, one tensor at a time.

    python benchmarks/draw.py [--tensors 1000] [--mb 1] [--gb 2] [--plain 20] [--jobs 2] [--only statistics|figures]

Collections of bfloat16 `.pt` files, with hashes and without, are made below TMPDIR and read once, so that they are in
the system's cache.

statistics: `quantexp draw --only statistics`, the whole command from the start of Python to its last line: count, mean,
std, extremes, skew, kurtosis, eleven quantiles, zeros, NaN and Inf of each tensor, as text, CSV and JSON.

figures: the whole command with every figure as PNG and PDF.

plain: torch.load, float32, numpy's mean, std and quantiles; a histogram, a box plot, a Q-Q plot and a heatmap by
matplotlib, as PNG; the first tensors of the same collection, in one process, without its start.

Processor time is that of `--jobs 1` for two parts of the collection, the difference: what the machine does beside it,
and the start, are not in it. What two free cores take is half of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import NormalDist
from typing import Any

#: Elements in a row.
COLUMNS = 1024


def make(folder: Path, number: int, num_bytes: int, hashed: bool) -> None:
    """A collection as a run leaves it: normal values, every tenth tensor with heavy tails."""
    import torch

    from quantexp.capture.store.values import content_hash

    torch.manual_seed(number)
    (folder / "mxfp8").mkdir(parents=True)
    slot = {"format": "mxfp8_e4m3", "axis": "input_width", "block": 32, "scale_rule": "rceil"}
    with (folder / "manifest.jsonl").open("w") as manifest:
        for i in range(number):
            x = torch.randn(num_bytes // 2 // COLUMNS, COLUMNS)
            x = (x**3 if i % 10 == 0 else x).bfloat16()
            file = f"mxfp8/20260101_000000_{i:05d}_linear_L{i % 16}-fc1_forward_pre_linear_mxfp8_input.pt"
            torch.save({"tensor": x, "metadata": {}}, folder / file)
            line = {"file": file, "module": "fc1", "layer": i % 16, "layer_type": "linear"}
            line |= {"operation": "forward", "phase": "pre", "component": "linear"}
            line |= {"quant_type": "mxfp8", "tensor": "input", "iteration": i // 16, "rank": 0}
            line |= {"micro_batch": 0, "shape": list(x.shape), "dtype": "bfloat16"}
            line |= {"bytes": x.nbytes, "hash": content_hash(x) if hashed else None}
            manifest.write(json.dumps(line | {"formats": {"fprop.x": slot}}) + "\n")


def warm(folder: Path) -> None:
    """Have every file in the system's cache."""
    for path in folder.rglob("*.pt"):
        path.read_bytes()


def command(folder: Path, out: Path, jobs: int, *more: str) -> tuple[float, float]:
    """Wall seconds of a whole command, and processor seconds where it has no workers."""
    words = [sys.executable, "-m", "quantexp", "draw", str(folder), f"out={out}"]
    before, start = os.times(), time.perf_counter()
    subprocess.run([*words, "--jobs", str(jobs), *more], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    return wall, sum(after[2:4]) - sum(before[2:4])


def per_tensor(folder: Path, out: Path, layers: tuple[str, str], *more: str) -> float:
    """Processor seconds of one more tensor: between two choices of layers of 16."""
    result = []
    for layer in layers:
        _, processor = command(folder, out / layer, 1, f"layer={layer}", *more)
        number = (out / layer / "tensor_stats.txt").read_text().split(maxsplit=1)[0]
        result.append((int(number), processor))
    (few, less), (many, more_s) = result
    return (more_s - less) / (many - few)


def statistics(root: Path, gb: float, mb: float, jobs: int) -> None:
    """Bytes a second of the statistics."""
    each = int(mb * 1e6) // 2048 * 2048
    number = max(16, round(gb * 1e9 / each))
    for hashed in (False, True):
        folder = root / f"statistics{hashed}"
        make(folder, number, each, hashed)
        warm(folder)
        only = ("--only", "statistics")
        wall, _ = command(folder, root / f"all{hashed}", jobs, *only)
        processor = per_tensor(folder, root / f"parts{hashed}", ("0-1", "0-15"), *only)
        _say(
            f"statistics, {number} tensors of {mb:g} MB, {'hashes checked' if hashed else 'no hashes'}: the command "
            f"{wall:.1f} s, {number * each / wall / 1e9:.2f} GB/s; {processor * 1e3:.1f} ms of processor time a "
            f"tensor, {each / processor / 1e9:.2f} GB/s a core; load {os.getloadavg()[0]:.1f}"
        )


def figures(root: Path, number: int, mb: float, num_plain: int, jobs: int) -> None:
    """Seconds for all figures, and what the plain script takes for as many tensors."""
    folder = root / "figures"
    make(folder, number, int(mb * 1e6) // 2048 * 2048, hashed=True)
    warm(folder)
    wall, _ = command(folder, root / "drawn", jobs)
    count = sum(path.suffix in (".png", ".pdf") for path in (root / "drawn").rglob("*.p*"))
    _say(
        f"figures, {number} tensors of {mb:g} MB: {wall:.0f} s, {count} PNG and PDF files; load "
        f"{os.getloadavg()[0]:.1f}"
    )
    wall, _ = command(folder, root / "drawn", jobs)
    _say(f"the same command again, nothing left to do: {wall:.1f} s")
    only = ("--only", "distributions,heatmaps,statistics", "iteration=0-1")
    processor = per_tensor(folder, root / "parts", ("0", "0-9"), *only)
    _say(
        f"{processor:.3f} s of processor time a tensor; {number} on {jobs} free cores {processor * number / jobs:.0f} s"
    )
    start, before = time.perf_counter(), time.process_time()
    plain(sorted((folder / "mxfp8").glob("*.pt"))[:num_plain], root / "plain")
    wall, processor = time.perf_counter() - start, time.process_time() - before
    _say(
        f"plain numpy and matplotlib, {num_plain} of them, PNG alone: {wall / num_plain:.2f} s a tensor, "
        f"{processor / num_plain:.3f} s of processor time; {number} take {processor * number / num_plain:.0f} s"
    )


def plain(files: list[Path], out: Path) -> None:
    """What people write who need the figures once."""
    import matplotlib.pyplot as plt
    import numpy as np
    import torch

    out.mkdir()
    inverse = NormalDist().inv_cdf
    for file in files:
        x = torch.load(file, weights_only=True)["tensor"].float().numpy()
        values = x.ravel()
        record: dict[str, Any] = {"mean": float(values.mean()), "std": float(values.std())}
        record |= {"quantiles": np.quantile(values, [0.01, 0.25, 0.5, 0.75, 0.99]).tolist()}
        figure, (histogram, box, normal) = plt.subplots(1, 3, figsize=(12, 4))
        histogram.hist(np.log2(np.abs(values[values != 0])), bins=100)
        box.boxplot(values, showfliers=False)
        shares = (np.arange(1000) + 0.5) / 1000
        normal.plot([inverse(share) for share in shares], np.quantile(values, shares), ".")
        figure.suptitle(file.stem)
        figure.tight_layout()
        figure.savefig(out / f"{file.stem}.png")
        plt.close(figure)
        figure, axes = plt.subplots()
        figure.colorbar(axes.imshow(np.abs(x), aspect="auto"))
        figure.savefig(out / f"{file.stem}_heatmap.png")
        plt.close(figure)
        (out / f"{file.stem}.json").write_text(json.dumps(record))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(description="quantexp draw on a large collection.")
    parser.add_argument("--tensors", type=int, default=1000, help="of the figures")
    parser.add_argument("--mb", type=float, default=1.0, help="of each, 1e6 bytes")
    parser.add_argument("--gb", type=float, default=2.0, help="of the statistics, 1e9 bytes")
    parser.add_argument("--statistics-mb", type=float, nargs="+", default=[1.0, 16.0])
    parser.add_argument("--plain", type=int, default=20, help="tensors of the plain script")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=["statistics", "figures"])
    arguments = parser.parse_args()
    _say(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as root:
        if arguments.only != "figures":
            for mb in arguments.statistics_mb:
                part = Path(root) / f"{mb:g}"
                part.mkdir()
                statistics(part, arguments.gb, mb, arguments.jobs)
        if arguments.only != "statistics":
            counts = (arguments.tensors, arguments.mb, arguments.plain)
            figures(Path(root), *counts, arguments.jobs)


if __name__ == "__main__":
    main()
