"""Statistics of a tensor on a CPU: the compiled code against copy_ of the same tensor, interleaved.

    python benchmarks/tensor_statistics.py [--size 4096] [--turns 15] [--flags=-mno-avx512f]

One thread, as in a capture, in processor time; without a format, and with what mxfp8 would lose along the last axis.
`of copy` is the time of copy_ over that of the statistics: medians of the turns. `torch` is the code that runs without
a compiler, once, and `described` the part of it that derives moments, quantiles and magnitudes from the counts.
`--flags` are added to those that the C is compiled with.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from quantexp import compiled
from quantexp.capture.statistics import summary
from quantexp.capture.statistics.fidelity import Chosen, chosen_for


def seconds(run: Callable[[], object]) -> float:
    """The processor time of one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def without_kernel(x: Tensor, chosen: Chosen | None) -> None:
    """The torch code."""
    with patch.object(summary, "kernel_for", lambda _: None):
        summary.statistics(x, chosen)


def main() -> None:
    """Print a row for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--flags", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compiled.FLAGS = (*compiled.FLAGS, *arguments.flags.split())
    print("| dtype | format | copy_, ms | statistics, ms | of copy | torch, ms | described, ms |")  # noqa: T201
    print("|---|---|---|---|---|---|---|")  # noqa: T201
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(arguments.size, arguments.size).to(dtype)
        out = torch.empty_like(x)
        for name in ("", "mxfp8"):
            chosen = chosen_for(name, "input") if name else None
            summary.statistics(x, chosen)  # compiles
            ways = (partial(out.copy_, x), partial(summary.statistics, x, chosen))
            turns = [[seconds(way) for way in ways] for _ in range(arguments.turns)]
            copy, counted = (statistics.median(times) for times in zip(*turns, strict=True))
            slow = seconds(partial(without_kernel, x, chosen))
            described = seconds(partial(summary.described, x, summary.summarise_counted(x)[1]))
            cells = (1e3 * copy, 1e3 * counted, copy / counted, 1e3 * slow, 1e3 * described)
            row = "{:.2f} | {:.2f} | {:.2f} | {:.1f} | {:.2f}".format(*cells)
            print(f"| {str(dtype).removeprefix('torch.')} | {name} | {row} |")  # noqa: T201


if __name__ == "__main__":
    main()
