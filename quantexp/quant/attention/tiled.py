"""Attention in tiles of queries: the plain path's products with at most one tile of T x T in memory.

    forward    S = a q k^T, P = softmax(S), o = P v              tile by tile; only o is kept
    backward   S and P recomputed; dP = dO v^T, dS; dq = a dS k  tile by tile
               dv = sum of P^T dO, dk = sum of a dS^T q          over tiles, in float32, rounded once at the end

    # T tokens (queries or keys), B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    # N = B*H

A tile (`quantexp.quant.attention.tiles`) contains whole blocks in both directions and whole rows. P and dS are
therefore quantised as in the plain path, the softmax is Megatron's own on each row, and S, P, dP and dS are rounded to
the working dtype between the products. A scale of a whole P or dS needs the amax over all tiles, so an extra pass
computes it first. Differences from the plain path (`quantexp.quant.attention.plain`):
- o and dq are the same products on fewer rows. They are bit-identical wherever the matrix product sums a row in the
  same order for any number of rows: torch on a CPU does so in 16 bits, and in float32 except for a few rows.
- dk and dv are the same sums in another order; both paths sum in float32 and round once.
- Under the causal mask, 16-bit runs skip the keys after a tile's last query: their P is exactly 0, unless every score
  that a query may see is near the -10000 that masks hidden keys. In float32 a shorter sum has another order, so
  all keys are multiplied.

- Ranks that share a sequence (`context_parallel`) skip no keys: the queries of a tile are not neighbours.

On a CUDA device Triton kernels (`quantexp.quant.attention.kernels`) multiply what they support; the torch tiles do so
where ranks share a sequence. If the proof of engagement or a hook of P, dP or dS is active, the torch tiles run as
well: proof and hooks observe every product and operand of the tiles. Training continues with the kernels' o, dq, dk and
dv, which must agree with those of the tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantexp.formats.types import Delta
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.kernels.agreement import require_gradients, require_output
from quantexp.quant.attention.kernels.gpu import Kernels, claims
from quantexp.quant.attention.tile_passes import Backward, Forward
from quantexp.quant.attention.tile_products import Probabilities, RowSums, TileProducts
from quantexp.quant.product_context import is_watched
from quantexp.quant.sites import FPROP_P


def attention(
    call: AttentionCall,
    q_TBHD: Tensor,
    k_TBGD: Tensor,
    v_TBGE: Tensor,
    probabilities: Probabilities,
    exponentials: RowSums | None = None,
) -> Tensor:
    """The output o, [N, T, E], differentiable in q, k and v; `probabilities` is the softmax with the call's mask.

    `exponentials` is needed where P is declared as `unnormalised`.

    Raises:
        EngagementError: the kernels' result differs from that of the torch tiles.
    """
    work = TileProducts(call, q_TBHD, probabilities, exponentials)
    kernels = kernels_for(call, q_TBHD, v_TBGE)
    result: Tensor = _Tiled.apply(q_TBHD, k_TBGD, v_TBGE, work, kernels)  # type: ignore[no-untyped-call]
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
    ) -> Tensor:
        k_TBGD, v_TBGE = work.call.all_keys(k_TBGD), work.call.all_keys(v_TBGE)
        inputs = q_TBHD, k_TBGD, v_TBGE
        ctx.save_for_backward(*inputs)
        ctx.work, ctx.kernels = work, kernels
        tiles = Forward(work)
        with work.inputs(q=q_TBHD, k=k_TBGD, v=v_TBGE):
            if kernels is None:
                o = tiles.output()
                if work.spec(FPROP_P).softmax.delta is Delta.O:
                    ctx.save_for_backward(*inputs, o)
                return o
            o = kernels.forward(work.quantised)
            if tiles.is_observed or is_watched():
                require_output(kernels, work, o, tiles.output())
            return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        work: TileProducts = ctx.work
        kernels: Kernels | None = ctx.kernels
        q, k, v, *output = ctx.saved_tensors
        with work.inputs(q=q, k=k, v=v, dO=grads[0]):
            tiles = Backward(work, *output)
            if kernels is None:
                gradients = tiles.gradients()
            else:
                gradients = kernels.backward(work.quantised)
                if tiles.is_observed or is_watched():
                    require_gradients(kernels, work, gradients, tiles.gradients())
            return *tiles.finish(*gradients), None, None


def kernels_for(call: AttentionCall, q_TBHD: Tensor, v_TBGE: Tensor) -> Kernels | None:
    """The kernels for one micro-batch of one attention module; None means the torch tiles."""
    if call.share is not None or not claims(call.precision, q_TBHD, v_TBGE):
        return None
    return Kernels(call)
