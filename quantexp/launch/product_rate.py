"""How fast this machine multiplies matrices, measured: GFLOP/s of a precision on a device.

Measured are the three products of a linear layer's training, y = x w^T, dx = g w and dw = g^T x, of square matrices,
because a processor's kernels may serve one order of the operands and not another. They are multiplied as training
does: through fp32 on a CPU without instructions for the precision. Each size counts with the best of a few samples,
and the size is doubled while the next one still fits the time budget, so that a device which is a thousand times slower
takes no longer.

On a CPU with several threads one thread is measured too, and the larger rate counts: where other programs hold a
processor, every thread waits for the one that was interrupted. The result is kept for the process. torch is imported by
the first measurement.
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


#: Seconds that a measurement takes at most, about.
BUDGET_S = 0.3
#: Rows and columns of the first matrices and, on a CPU and a GPU, of the largest.
_FIRST, _LARGEST_CPU, _LARGEST_GPU = 64, 2048, 8192
#: Floating-point operations of the three products of size N are this times N^3.
_FLOP = 3 * 2
#: Of each size; the best counts.
_SAMPLES = 3
#: The next size has eight times the work; it is taken where the budget holds one call to warm up and every sample.
_NEXT = 8 * (1 + _SAMPLES)


@cache
def product_gflop_per_s(precision: Precision, device: torch.device) -> float:
    """GFLOP/s (1e9) of matrix products in this precision, the best of those that were measured."""
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
    """`95.2 GFLOP/s`: three significant digits, however small the rate."""
    rounded = float(f"{gflop_per_s:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(rounded))) if rounded else 0
    return f"{rounded:,.{decimals}f} GFLOP/s"


def _best_rate(dtype: torch.dtype, device: torch.device, budget_s: float) -> float:
    import torch

    until = time.perf_counter() + budget_s
    largest = _LARGEST_CPU if device.type == "cpu" else _LARGEST_GPU
    size, best = _FIRST, 0.0
    while True:
        x, w, g = (torch.ones(size, size, device=device).to(dtype) for _ in range(3))
        _seconds(x, w, g)  # the first call of a shape may compile, or allocate
        seconds = min(_seconds(x, w, g) for _ in range(_SAMPLES))
        best = max(best, _FLOP * size**3 / seconds / 1e9)
        if size >= largest or time.perf_counter() + _NEXT * seconds > until:
            break
        size *= 2
    while time.perf_counter() + seconds <= until:  # other programs may have been in the way
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
