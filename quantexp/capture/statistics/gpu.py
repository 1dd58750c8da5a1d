"""Histograms by Triton on an NVIDIA GPU: when, and how they are launched. Nothing synchronises with the device."""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.kernels import gpu

#: Elements of a program, and its warps.
_SIZE, _NUM_WARPS = 2048, 4
#: Copies of the counts: one for so many elements, and at most so many.
_ELEMENTS_OF_A_COPY, _MOST_COPIES = 1 << 16, 32
#: So many elements can be counted in int32.
_MOST_ELEMENTS = 1 << 31


def counts(x_N: Tensor, num_bins: int) -> Tensor:
    """The count of each 16-bit pattern, int64; for float32, of the upper halves.

    x is contiguous and `counts_here`; `num_bins` is the number of patterns, 65,536.
    """
    from quantexp.capture.statistics.triton_counts import count_patterns

    N, is_wide = x_N.numel(), x_N.dtype == torch.float32
    copies = min(_MOST_COPIES, N // _ELEMENTS_OF_A_COPY + 1)
    counts_CV = torch.zeros(copies, num_bins, dtype=torch.int32, device=x_N.device)
    if N:
        words = x_N.view(torch.int32 if is_wide else torch.int16)
        with gpu.on(x_N):
            count_patterns[(-(-N // _SIZE),)](
                words,
                counts_CV,
                N,
                copies,
                NUM_BINS=num_bins,
                SIZE=_SIZE,
                SHIFT=16 if is_wide else 0,
                num_warps=_NUM_WARPS,
            )
    return counts_CV.sum(0)


def counts_here(x: Tensor) -> bool:
    """Whether `counts` takes such a tensor."""
    return x.is_cuda and x.numel() < _MOST_ELEMENTS and gpu.obstacle(x.device) is None
