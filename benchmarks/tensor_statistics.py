"""Statistics of a tensor on a CPU: the compiled code against copy_ of the same tensor, interleaved.

    python benchmarks/tensor_statistics.py [--size 4096] [--turns 15] [--flags=-mno-avx512f]

One thread, as in a capture. `of copy` is the time of copy_ over that of the statistics: medians of the turns. `torch`
is the code that runs without a compiler, once. `--flags` are added to those that the C is compiled with.
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

from quantexp.capture.statistics import summary
from quantexp.processes import compiled


def seconds(run: Callable[[], object]) -> float:
    """The wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def without_kernel(x: Tensor) -> None:
    """The torch code."""
    with patch.object(summary, "kernel_for", lambda _: None):
        summary.statistics(x)


def main() -> None:
    """Print a row for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--flags", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compiled.FLAGS = (*compiled.FLAGS, *arguments.flags.split())
    print("| dtype | copy_, ms | statistics, ms | of copy | torch, ms |\n|---|---|---|---|---|")  # noqa: T201
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(arguments.size, arguments.size).to(dtype)
        out = torch.empty_like(x)
        summary.statistics(x)  # compiles
        ways = (partial(out.copy_, x), partial(summary.statistics, x))
        turns = [[seconds(way) for way in ways] for _ in range(arguments.turns)]
        copy, counted = (statistics.median(times) for times in zip(*turns, strict=True))
        slow = seconds(partial(without_kernel, x))
        row = (
            f"{1e3 * copy:.1f}",
            f"{1e3 * counted:.1f}",
            f"{copy / counted:.2f}",
            f"{1e3 * slow:.0f}",
        )
        print(f"| {str(dtype).removeprefix('torch.')} | {' | '.join(row)} |")  # noqa: T201


if __name__ == "__main__":
    main()
