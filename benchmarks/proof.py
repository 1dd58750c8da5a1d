"""Time to compare one operand with the image of its source, by format and size, beside quantisation and a copy.

    OMP_NUM_THREADS=1 python benchmarks/proof.py [--repeats 15]

The operands are normal values in bf16, quantised by the format's defaults along their last axis. The comparison is that
of the first iteration of a run: every element, bit for bit. Times are medians in milliseconds of one thread.
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
from quantexp.proof.image import num_differing

SHAPES = ((1024, 1024), (8192, 2048))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time to compare one operand with its image.")
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    sys.stdout.write("shape        format       compare ms  quantise ms  copy ms\n")
    for shape in SHAPES:
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        for name in (each for each in FORMATS if each != "bf16"):
            spec = resolve(name)
            operand = quantise(x, spec, axis=-1)
            out = torch.empty_like(operand)
            if num_differing(operand, x, spec, -1):
                raise AssertionError(f"{name}: an honest operand differs from its image")
            times = [
                median_ms(work, repeats)
                for work in (
                    partial(num_differing, operand, x, spec, -1),
                    partial(quantise, x, spec, axis=-1, out=out),
                    partial(out.copy_, operand),
                )
            ]
            size = " x ".join(map(str, shape))
            row = f"{size:12} {name:12} {times[0]:10.1f} {times[1]:12.2f} {times[2]:8.2f}"
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
