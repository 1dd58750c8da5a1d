"""Chooses the kernels of tiled attention: the fastest that support it, else None, and torch multiplies.

CUDA    Triton, see `gpu`
"""

from __future__ import annotations

from torch import Tensor

from quantexp.quant.kernels import gpu
from quantexp.quant.precision import ModulePrecision


def kernels_for(
    precision: ModulePrecision,
    q_TBHD: Tensor,
    v_TBGE: Tensor,
    softmax_scale: float,
    mask: Tensor | None,
) -> gpu.Kernels | None:
    """The kernels for one micro-batch of one attention module; None means the torch tiles."""
    if not gpu.claims(precision, q_TBHD, v_TBGE):
        return None
    return gpu.Kernels(precision, softmax_scale, mask)
