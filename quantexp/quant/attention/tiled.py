"""Attention in tiles of queries: the plain path's products, of which no more than a tile of T x T is ever held.

    forward    S = a q k^T, P = softmax(S), o = P v              tile by tile, and all but o forgotten
    backward   S and P again; dP = dO v^T, dS; dq = a dS k       tile by tile
               dv = sum of P^T dO, dk = sum of a dS^T q          over tiles, in float32, rounded once at the end

    # T tokens (queries or keys), B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    # N = B*H

A tile (`quantexp.quant.attention.tiles`) has whole blocks both ways and whole rows, so P and dS are quantised as the
plain path quantises them, the softmax is Megatron's own on each row, and S, P, dP and dS are rounded to the working
dtype between the products as there. A scale of a whole P or dS needs an amax over all tiles: they are made once for
that, and again. Against the plain path (`quantexp.quant.attention.plain`): - o and dq are the same products on fewer
rows: the same to the bit as far as the matrix product sums a row alike
  however many there are, which torch's does on a CPU in 16 bits, and in float32 but for a few rows.
- dk and dv are the same sums in another order, in float32 either way, and rounded once either way.
- Under the causal mask keys after a tile's last query are left out, in 16 bits: their P is exactly 0, unless every
  score that a query may see is near the -10000 that stands for what it may not. In float32 a shorter sum is ordered
  differently, so there all keys are multiplied.

On a CUDA device Triton's kernels (`quantexp.quant.kernels`) multiply what they claim. Where somebody looks, the proof
or a tap of P, dP or dS, the tiles of torch are made beside them: they are what is looked at, in every product and
operand, and the kernels' o, dq, dk and dv, which the training goes on with, have to agree with theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantexp.quant.attention.fused import Asked
from quantexp.quant.attention.tile_passes import Backward, Forward
from quantexp.quant.attention.tile_products import Probabilities, TileProducts
from quantexp.quant.hooks import Tap
from quantexp.quant.kernels.agreement import require_gradients, require_output
from quantexp.quant.kernels.choice import kernels_for
from quantexp.quant.kernels.gpu import Kernels
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import is_watched


def attention(
    precision: ModulePrecision,
    tap: Tap,
    asked: Asked,
    q_TBHD: Tensor,
    k_TBGD: Tensor,
    v_TBGE: Tensor,
    softmax_scale: float,
    probabilities: Probabilities,
    mask: Tensor | None,
) -> Tensor:
    """The output o, [N, T, E], differentiable in q, k and v.

    Args:
        precision: the module's slots.
        tap: is handed what `asked` says, and the gradients.
        asked: whether P, its gradient or that of the scores is looked at.
        q_TBHD: queries.
        k_TBGD: keys.
        v_TBGE: values.
        softmax_scale: a.
        probabilities: the softmax with its mask.
        mask: the same mask, True where a query does not see a key, [B or 1, 1, T, T]; None is causal.

    Raises:
        EngagementError: the kernels' result is not that of the tiles beside them.
    """
    can_shorten = mask is None and q_TBHD.dtype != torch.float32
    work = TileProducts(precision, q_TBHD, softmax_scale, probabilities, can_shorten=can_shorten)
    kernels = kernels_for(precision, q_TBHD, v_TBGE, softmax_scale, mask)
    result: Tensor = _Tiled.apply(q_TBHD, k_TBGD, v_TBGE, work, kernels, tap, asked)  # type: ignore[no-untyped-call]
    return result


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TBHD: Tensor,
        k_TBGD: Tensor,
        v_TBGE: Tensor,
        work: TileProducts,
        kernels: Kernels | None,
        tap: Tap,
        asked: Asked,
    ) -> Tensor:
        ctx.save_for_backward(q_TBHD, k_TBGD, v_TBGE)
        ctx.work, ctx.kernels, ctx.tap, ctx.asked = work, kernels, tap, asked
        tiles = Forward(work, tap, asked)
        with work.made_from(q=q_TBHD, k=k_TBGD, v=v_TBGE):
            if kernels is None:
                return tiles.output()
            o = kernels.forward(work.held)
            if tiles.is_looked_at or is_watched():
                require_output(kernels, work, o, tiles.output())
            return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        work: TileProducts = ctx.work
        kernels: Kernels | None = ctx.kernels
        q, k, v = ctx.saved_tensors
        with work.made_from(q=q, k=k, v=v, dO=grads[0]):
            tiles = Backward(work, ctx.tap, ctx.asked)
            if kernels is None:
                found = tiles.gradients()
            else:
                found = kernels.backward(work.held)
                if tiles.is_looked_at or is_watched():
                    require_gradients(kernels, work, found, tiles.gradients())
            return *tiles.ended(*found), None, None, None, None
