"""Measures the rate of matrix products on this machine: GFLOP/s for a precision and a device.

The measurement times the three products of a linear layer, y = x w^T, dx = g w and dw = g^T x, of square matrices,
because a kernel may be fast for one order of the operands and slow for another. It multiplies as training does: through
fp32 on a CPU without instructions for the precision. Each size is sampled several times and the best sample counts. The
size doubles while the next one fits the time budget, so a device that is a thousand times slower takes no longer.

On a CPU with several threads the measurement is repeated with one thread, and the larger rate counts: when other
programs occupy a core, every thread waits for the one that was interrupted. The result is cached for the process. The
first measurement imports torch.
"""

from __future__ import annotations

import math
import time
from functools import cache
from typing import TYPE_CHECKING

from quantexp.runs.device import multiplies_natively
from quantexp.schema import Precision

if TYPE_CHECKING:
    import torch


#: The approximate maximum time of a measurement, seconds.
BUDGET_S = 0.3
#: Rows and columns of the smallest matrices, and of the largest on a CPU and on a GPU.
_FIRST, _LARGEST_CPU, _LARGEST_GPU = 64, 2048, 8192
#: The three products of size N take this many times N^3 floating-point operations.
_FLOP = 3 * 2
#: Samples of each size.
_SAMPLES = 3
#: The next size takes eight times the time, for one warm-up call and every sample.
_NEXT = 8 * (1 + _SAMPLES)


@cache
def product_gflop_per_s(precision: Precision, device: torch.device) -> float:
    """The best measured GFLOP/s (1e9) of matrix products in this precision."""
    import torch

    from quantexp.quant.products import through_fp32

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtype = dtypes[precision.value]
    is_native = device.type != "cpu" or multiplies_natively(precision)
    with through_fp32([] if is_native else [dtype]):
        num_threads = torch.get_num_threads()
        if device.type != "cpu" or num_threads == 1:
            return _best_rate(dtype, device, BUDGET_S)
        best = _best_rate(dtype, device, BUDGET_S / 2)
        torch.set_num_threads(1)
        try:
            return max(best, _best_rate(dtype, device, BUDGET_S / 2))
        finally:
            torch.set_num_threads(num_threads)


def rate_in_words(gflop_per_s: float) -> str:
    """`95.2 GFLOP/s`: three significant digits for any rate."""
    rounded = float(f"{gflop_per_s:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(rounded))) if rounded else 0
    return f"{rounded:,.{decimals}f} GFLOP/s"


def _best_rate(dtype: torch.dtype, device: torch.device, budget_s: float) -> float:
    import torch

    deadline = time.perf_counter() + budget_s
    largest = _LARGEST_CPU if device.type == "cpu" else _LARGEST_GPU
    size, best = _FIRST, 0.0
    while True:
        x, w, g = (torch.ones(size, size, device=device).to(dtype) for _ in range(3))
        _seconds(x, w, g)  # the first call of a shape may compile or allocate
        seconds = min(_seconds(x, w, g) for _ in range(_SAMPLES))
        best = max(best, _FLOP * size**3 / seconds / 1e9)
        if size >= largest or time.perf_counter() + _NEXT * seconds > deadline:
            break
        size *= 2
    while time.perf_counter() + seconds <= deadline:  # other programs may have slowed the samples
        seconds = _seconds(x, w, g)
        best = max(best, _FLOP * size**3 / seconds / 1e9)
    return best


def _seconds(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> float:
    import torch

    start = time.perf_counter()
    torch.mm(x, w.t())
    torch.mm(g, w)
    torch.mm(g.t(), x)
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start
