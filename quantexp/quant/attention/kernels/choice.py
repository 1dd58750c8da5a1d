"""Chooses the kernels of tiled attention: the fastest that support it, else None, and torch multiplies.

CUDA    Triton, see `gpu`
"""

from __future__ import annotations

from torch import Tensor

from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.kernels import gpu


def kernels_for(call: AttentionCall, q_TBHD: Tensor, v_TBGE: Tensor) -> gpu.Kernels | None:
    """The kernels for one micro-batch of one attention module; None means the torch tiles."""
    if not gpu.claims(call.precision, q_TBHD, v_TBGE):
        return None
    return gpu.Kernels(call)
