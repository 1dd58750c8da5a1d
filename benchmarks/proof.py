"""Time to judge one operand, by format and size, beside one quantisation of the operand and one copy of it.

    OMP_NUM_THREADS=1 python benchmarks/proof.py [--repeats 15]
    OMP_NUM_THREADS=1 python benchmarks/proof.py --operands FILE [key=value ...]

The operands are normal values in bf16, quantised by the format's defaults along their last axis. A judgement is that of
the first iteration of a run: every element lies on the declared grid, and no other format has produced the operand.
Times are medians in milliseconds of one thread. With options of a run, the second form trains it for three iterations
and writes its operands to the file; without, it judges all operands of the file. Both also run from older commits
(PYTHONPATH), to compare two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from quantexp.formats import FORMATS, quantise, resolve
from quantexp.proof.verdict import judge

SHAPES = ((1024, 1024), (8192, 2048))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time to judge one operand.")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--operands", type=Path, metavar="FILE", help="the operands of a run")
    parser.add_argument("words", nargs="*", metavar="key=value", help="of the run to record")
    arguments = parser.parse_args()
    repeats = arguments.repeats
    torch.set_num_threads(1)
    if arguments.words:
        record(arguments.words, arguments.operands)
        return
    if arguments.operands:
        calls = torch.load(arguments.operands, weights_only=False)
        ms = median_ms(lambda: [judge(*call) for call in calls], repeats)
        sys.stdout.write(f"{len(calls)} operands: {ms:.0f} ms\n")
        return
    sys.stdout.write("shape        format        judge ms  quantise ms  copy ms\n")
    for shape in SHAPES:
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        for name in ("bf16", *(each for each in FORMATS if each != "bf16")):
            spec = resolve(name)
            operand = x if name == "bf16" else quantise(x, spec, axis=-1)
            out = torch.empty_like(operand)
            times = [
                median_ms(work, repeats)
                for work in (
                    partial(judge, operand, spec, -1),
                    partial(quantise, operand, spec, axis=-1, out=out),
                    partial(out.copy_, operand),
                )
            ]
            size = " x ".join(map(str, shape))
            row = f"{size:12} {name:12} {times[0]:9.1f} {times[1]:12.2f} {times[2]:8.2f}"
            sys.stdout.write(row + "\n")


def record(words: Sequence[str], file: Path) -> None:
    """Write the arguments of every judgement in the first iteration of a run."""
    from quantexp.config.compose import compose
    from quantexp.launch.attempt import open_run
    from quantexp.proof import outside_products, watch
    from quantexp.runs.device import device_class
    from quantexp.training.worker import Worker

    calls: list[Sequence[object]] = []

    def noted(*call: Any) -> Any:
        calls.append([copied(x) if isinstance(x, torch.Tensor) else x for x in call])
        return judge(*call)

    with (
        tempfile.TemporaryDirectory() as root,
        patch.object(watch, "judge", noted),
        patch.object(outside_products, "judge", noted),
    ):
        fixed = ["training.iterations=3", "capture=off", "analysis.auto=false"]
        experiment = compose([*words, *fixed, f"paths.root={root}"])
        with open_run(experiment, device_class(experiment.launcher), ["proof.py"]) as (opened, _):
            if Worker(opened.run, experiment).run():
                raise RuntimeError(opened.run.status.read_text())
    torch.save(calls, file)


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """The median time of several calls after a first one."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
