"""How fast this machine multiplies matrices, measured: GFLOP/s of a dtype on a device.

Measured are the three products of a linear layer's training, y = x w^T, dx = g w and dw = g^T x, of square matrices,
because a processor's kernels may serve one order of the operands and not another. The size is doubled while the next
one still fits the time budget, so that a device which is a thousand times slower takes no longer. The result is kept
for the process. It imports torch when it is called.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


#: Seconds that a measurement takes at most, about.
BUDGET_S = 0.15
#: Rows and columns of the first matrices and, on a CPU and a GPU, of the largest.
_FIRST, _LARGEST_CPU, _LARGEST_GPU = 64, 2048, 8192
#: Floating-point operations of the three products of size N are this times N^3.
_FLOP = 3 * 2
#: The next size has eight times the work; it is taken where the budget holds it once to warm up and once to measure.
_NEXT = 2 * 8


@cache
def product_gflop_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """GFLOP/s (1e9) of matrix products, the best of those that were measured.

    On a CPU without instructions for the dtype call it inside `quantexp.quant.products.through_fp32`, as training does.

    Args:
        dtype: of both operands.
        device: where they lie.
    """
    import torch

    until = time.perf_counter() + BUDGET_S
    largest = _LARGEST_CPU if device.type == "cpu" else _LARGEST_GPU
    size, best = _FIRST, 0.0
    while True:
        x, w, g = (torch.ones(size, size, device=device).to(dtype) for _ in range(3))
        _seconds(x, w, g)  # the first call of a shape may compile, or allocate
        seconds = _seconds(x, w, g)
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
