"""Time to judge one operand, by format and size, beside one quantisation of the operand and one copy of it.

    OMP_NUM_THREADS=1 python benchmarks/proof.py [--repeats 15]

The operands are normal values in bf16, quantised by the format's defaults along their last axis. A judgement is that of
the first iteration of a run: every element lies on the declared grid, and no other format has produced the operand.
Times are medians in milliseconds of one thread. It also runs from older commits, to compare two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from quantexp.formats import FORMATS, quantise, resolve
from quantexp.proof.verdict import judge

SHAPES = ((1024, 1024), (8192, 2048))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time to judge one operand.")
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
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
