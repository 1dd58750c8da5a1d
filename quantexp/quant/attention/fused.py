"""Attention by torch's fused kernel, on operands held as the scheme declares.

    o = softmax(mask(a q k^T)) v        q, k in blocks along head_dim, v along keys

    # T tokens, B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    # a is the softmax scale

One kernel multiplies both ways, forward and backward, and holds S, P, dP and dS in float32 within: so they cannot be
quantised, and its backward multiplies the very q, k and v of the forward. `quantexp.quant.attention.fusable` refuses
every scheme that declares something else. Against the plain path, where S, P, dP and dS are rounded to the working
dtype between the products, the results differ by that rounding. Memory grows with T, not with its square. What the
plain path hands to a tap and the kernel never shows (P and its gradient, dS) is computed beside it, in float32 from the
same operands, when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quantexp.quant.attention.plain import expanded
from quantexp.quant.hooks import BACKWARD, FORWARD, POST, PRE, Tap, tell_operand
from quantexp.quant.operand import clipped, held
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import FusedAnnouncement, announce, observing
from quantexp.quant.sites import Product, Site

#: Whether anybody looks at a tensor, by operation and name.
Asked = Callable[[str, str], bool]
#: The kernels that never hold T x T; torch takes the first that can do it.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
#: The operands of the forward: site, name, dimension of [T, B, H, D] that blocks run along.
_FORWARD = ((Site.QK, "q", -1), (Site.QK, "k", -1), (Site.PV, "v", 0))


def nobody_asks(operation: str, name: str) -> bool:
    """Of a module that nobody looks at."""
    return False


def attention(
    precision: ModulePrecision,
    tap: Tap,
    asked: Asked,
    q_TBHD: Tensor,
    k_TBGD: Tensor,
    v_TBGE: Tensor,
    softmax_scale: float,
    mask: Tensor | None,
) -> Tensor:
    """The output o, [T, B, H, E], differentiable in q, k and v.

    Args:
        precision: the module's slots, as `require_fused` lets pass.
        tap: is handed what `asked` says, and the gradients.
        asked: whether P, its gradient or that of the scores is looked at.
        q_TBHD: queries.
        k_TBGD: keys.
        v_TBGE: values.
        softmax_scale: a.
        mask: True where a query does not see a key, [B or 1, 1, T, T]; None is causal.
    """
    result: Tensor = _Fused.apply(  # type: ignore[no-untyped-call]
        q_TBHD, k_TBGD, v_TBGE, precision, tap, asked, softmax_scale, mask
    )
    return result


def _kernel(
    q_TBHD: Tensor, k_TBGD: Tensor, v_TBGE: Tensor, softmax_scale: float, mask: Tensor | None
) -> Tensor:
    """The fused product of operands that are held already, [T, B, H, E]."""
    q, k, v = _by_head((q_TBHD, k_TBGD, v_TBGE)).values()
    with sdpa_kernel(_KERNELS):
        o_BHTD = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else ~mask,
            is_causal=mask is None,
            scale=softmax_scale,
        )
    return o_BHTD.permute(2, 0, 1, 3)[..., : v_TBGE.shape[3]]


def _probabilities(
    q_TBHD: Tensor, k_TBGD: Tensor, softmax_scale: float, mask: Tensor | None
) -> Tensor:
    """P of held operands, float32, [B, H, T, T]."""
    q = q_TBHD.permute(1, 2, 0, 3).float()
    k = expanded(k_TBGD, q.shape[1]).permute(1, 2, 3, 0).float()
    T = q.shape[2]
    if mask is None:
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax((q @ k * softmax_scale).masked_fill(mask, -torch.inf), dim=-1)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TBHD: Tensor,
        k_TBGD: Tensor,
        v_TBGE: Tensor,
        precision: ModulePrecision,
        tap: Tap,
        asked: Asked,
        softmax_scale: float,
        mask: Tensor | None,
    ) -> Tensor:
        given = (q_TBHD, k_TBGD, v_TBGE)
        operands = []
        for x, (site, name, axis) in zip(given, _FORWARD, strict=True):
            operand = held(x, precision.operand(site, Product.FPROP, name), axis)
            tell_operand(precision, site, Product.FPROP, name, x, operand)
            operands.append(operand.detach().requires_grad_())
        q, k, v = operands
        kept = given if _keeps_originals(precision) else None
        said = FusedAnnouncement(precision.module, None if kept is None else lambda: _by_head(kept))
        with torch.enable_grad(), announce(said):
            o = _kernel(q, k, v, softmax_scale, mask)
        if asked(FORWARD, "attn_weights"):
            with observing():
                P = _probabilities(q, k, softmax_scale, mask)
            tap(FORWARD, POST, "attn_weights", P.to(q_TBHD.dtype))
        ctx.given, ctx.operands, ctx.o = kept, operands, o
        ctx.said, ctx.precision = said, precision
        ctx.tap, ctx.asked, ctx.softmax_scale, ctx.mask = tap, asked, softmax_scale, mask
        return o.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dO,) = grads
        precision: ModulePrecision = ctx.precision
        _observe_backward(ctx, dO)
        with announce(ctx.said):
            found = torch.autograd.grad(ctx.o, ctx.operands, dO)
        ctx.o = None
        results = []
        for index, (gradient, (site, name, axis)) in enumerate(zip(found, _FORWARD, strict=True)):
            operand = precision.operand(site, Product.FPROP, name)
            x = gradient if ctx.given is None else ctx.given[index]
            results.append(clipped(gradient, x, operand, axis))
        ctx.tap(BACKWARD, PRE, "grad_output", dO)
        for gradient, name in zip(results, ("query", "key", "value"), strict=True):
            ctx.tap(BACKWARD, POST, f"grad_{name}", gradient)
        return *results, None, None, None, None, None


def _keeps_originals(precision: ModulePrecision) -> bool:
    """Whether an operand's gradient, or the proof, needs what the operand was made from."""
    operands = (precision.operand(site, Product.FPROP, name) for site, name, _ in _FORWARD)
    return any(operand.clip_gradient or operand.depends_on_moment for operand in operands)


def _by_head(given: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Queries, keys and values as the kernel gets them, [B, H, T, D]."""
    q, k, v = given
    H, D = q.shape[2:]
    v = functional.pad(v, (0, D - v.shape[3]))
    tensors = (q, expanded(k, H), expanded(v, H))
    return {name: x.permute(1, 2, 0, 3) for name, x in zip(("q", "k", "v"), tensors, strict=True)}


@torch.no_grad()
def _observe_backward(ctx: Any, dO_TBHE: Tensor) -> None:
    """What the kernel keeps to itself: dP = dO v^T, and dS = P (dP - sum over keys of P dP)."""
    wanted = [name for name in ("grad_scores", "grad_attn_weights") if ctx.asked(BACKWARD, name)]
    if not wanted:
        return
    q, k, v = ctx.operands
    with observing():
        P = _probabilities(q, k, ctx.softmax_scale, ctx.mask)
        dO = dO_TBHE.permute(1, 2, 0, 3).float()
        dP = dO @ expanded(v, q.shape[2]).permute(1, 2, 3, 0).float()
    dS = P * (dP - (P * dP).sum(dim=-1, keepdim=True))
    for name, phase, x in (("grad_scores", PRE, dS), ("grad_attn_weights", POST, dP)):
        if name in wanted:
            ctx.tap(BACKWARD, phase, name, x.to(q.dtype))
