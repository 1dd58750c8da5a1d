"""One matrix product of quantised operands, from the tensors in high precision to the result.

    quantise    each operand according to its slot, unless its copy exists: `quantise_operand`
    show        both, before and after, to the hooks: `call_operand_hooks`
    announce    the product to the proof of engagement: `product_context`
    multiply    and compensate operands with `pre_scale`

This is the one place where schemes use the number formats. All nine products take these steps: those of
`quantexp.quant.linear` and of the plain attention in `multiply_operands`; the tiled attention, which quantises once
what it multiplies in parts, by `quantised_operand` and `multiply`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantexp.formats import (
    QuantSpec,
    Scales,
    Scaling,
    finite_amax,
    hadamard,
    quantise,
    quantise_both,
    quantise_transformed,
    saturated,
    scales_of,
)
from quantexp.formats.estimator import dge_factors
from quantexp.formats.torch_internals import beside_modes
from quantexp.quant.hooks import Layout, call_operand_hooks, same_layout
from quantexp.quant.parts import every_pair, take_part
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.product_context import ProductContext, product_context, show_product
from quantexp.quant.sharing import is_one_tensor, shares_read
from quantexp.quant.sites import Product, Site, Slot, dim_of, operands_of
from quantexp.quant.step_state import Piece, current_state
from quantexp.quant.whole_amax import transform_of, transformed, whole_amax


@dataclass(frozen=True)
class Factor:
    """One operand of a product, before quantisation."""

    slot: Slot
    x: Tensor
    #: Maps x, or its copy, to the matrix (or stack of matrices) that is multiplied.
    matrix: Layout = same_layout
    #: Maps x to the layout in which it is captured.
    captured: Layout = same_layout
    #: x quantised, if the copy exists.
    copy: Tensor | None = None


def multiply_operands(
    precision: ModulePrecision,
    left: Factor,
    right: Factor,
    *,
    scale: float = 1.0,
    source: int | None = None,
    is_summed: bool = False,
    is_shown: bool = True,
) -> Tensor:
    """`scale` times the product of both operands, as the module declares them.

    `source` is that of an expert's rows, if they are of one alone. The result is float32 if it is to be summed with
    those of other ranks before it is rounded. The hooks receive the operands if `is_shown`.
    """
    a, b = (
        factor.matrix(
            quantised_operand(
                precision, factor.slot, factor.x, factor.captured, factor.copy, is_shown=is_shown
            )
        )
        for factor in (left, right)
    )
    context = ProductContext(
        precision.module,
        left.slot.site,
        left.slot.product,
        widened_from=a.dtype if is_summed else None,
        source=source,
    )
    specs = precision.spec(left.slot), precision.spec(right.slot)
    numbers = [spec.num_pieces for spec in specs]
    if numbers != [1, 1]:
        a, b = every_pair(a, b, *numbers)
    if is_summed:
        a, b = a.float(), b.float()
    scale *= post_scale(*specs)
    return multiply(context, a, b, scale)


def quantised_operand(
    precision: ModulePrecision,
    slot: Slot,
    x: Tensor,
    captured: Layout = same_layout,
    copy: Tensor | None = None,
    *,
    is_shown: bool = True,
) -> Tensor:
    """x quantised as the module declares, or its copy if that exists; the hooks receive it if `is_shown`."""
    spec = precision.spec(slot)
    if copy is None:
        copy = make_operand(precision.module, x, spec, dim_of(slot.operand, spec))
    if is_shown and not spec.parts:
        call_operand_hooks(precision, slot, x, copy, captured)
    return copy


def source_of(precision: ModulePrecision, slot: Slot, x: Tensor) -> Tensor:
    """What a slot quantises of x: x itself, its stored copy, or the forward product's, made again without effect on
    histories.
    """
    for copy in precision.spec(slot).chain[:-1]:
        x = make_operand(precision.module, x, copy, dim_of(slot.operand, copy))
    return x


def make_operand(
    module: ModuleId, x: Tensor, spec: QuantSpec, axis: int, out: Tensor | None = None
) -> Tensor:
    """`quantise_operand` under the amax of the whole tensor; an operand in parts has them one after another along axis.

    The parts of the operand come first, then what remains of it, then the parts of the error.
    """
    if not spec.parts:
        amax = whole_amax(module, x, spec, axis) if spec.quantised else None
        return quantise_operand(x, spec, axis, amax, out)

    def rounded(v: Tensor, own: QuantSpec) -> Tensor:
        return make_operand(module, v, own, axis).to(x.dtype)

    pieces: list[Tensor] = []
    rest = x.float()
    for from_error in (False, True):
        for part in spec.parts:
            if part.from_error is from_error:
                own = take_part(rest, part)
                own = own.to(x.dtype) if part.spec is None else rounded(own, part.spec)
                pieces += [] if part.spec is None else [own]
                rest = rest - own.float()
        if not from_error:
            pieces.append(rounded(rest, replace(spec, parts=())))
            rest = rest - pieces[-1].float()
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=axis)


def product_scale(precision: ModulePrecision, site: Site, product: Product) -> float:
    """The factor that compensates operands with `pre_scale`."""
    return post_scale(*(precision.spec(slot) for slot in operands_of(site, product)))


def post_scale(*specs: QuantSpec) -> float:
    """1 over the product of the operands' factors: 4/3 for each time that 3/4 was rounded (arXiv 2502.20586)."""
    return math.prod(1.0 / each.pre_scale for spec in specs for each in spec.chain)


def multiply(context: ProductContext, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` a b, with the scale applied before the product is rounded to its dtype.

    Args:
        context: identifies the product.
        a: [..., K] with a matrix b, [N, T, K] with a stack of matrices.
        b: [K, M] or [N, K, M].
        scale: in float32.
    """
    show_product(context, a, b)
    with product_context(context):
        if scale == 1.0:
            return torch.matmul(a, b)
        if b.dim() == 2:
            flat = a.flatten(0, -2)
            unused = flat.new_empty(flat.shape[0], b.shape[1])
            product = torch.addmm(unused, flat, b, beta=0.0, alpha=scale)
            return product.view(*a.shape[:-1], b.shape[1])
        unused = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
        return torch.baddbmm(unused, a, b, beta=0.0, alpha=scale)


@beside_modes
def quantise_operand(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    amax: Tensor | None = None,
    out: Tensor | None = None,
    pieces: Sequence[Piece] | None = None,
) -> Tensor:
    """`x` on the grid of its format, in x's shape and dtype; `x` itself if the slot keeps the working precision.

    With a Hadamard transform, the transform of x lies on the grid, rounded from float32. An empty tensor (an expert
    without tokens) stays empty and enters no amax; its history exists, for the amaxes of other ranks.

    Args:
        x: the operand in high precision, never quantised before.
        spec: what its slot declares.
        axis: the dimension of x that the product reduces over: blocks run along it.
        amax: if x is part of a tensor whose scale depends on its amax (`follows_own_amax`), the amax of the whole.
        out: where the result may be written, of x's shape and dtype.
        pieces: the pieces that x consists of, with their positions in the tensor it is part of, on which random numbers
            depend; no pieces mean that x is whole, None those of the step state.
    """
    if spec.quantised and x.numel() == 0 and spec.scaling is Scaling.DELAYED:
        current_state().history_for(spec, x.device)
    if not spec.quantised or x.numel() == 0:
        return x
    if not spec.needs_step_state:
        return quantise(x, spec, axis=axis, amax=amax, out=out)
    state = current_state()
    draw = state.draw(spec)
    pieces = state.pieces(spec, x.shape) if pieces is None else pieces
    place = pieces[0][1] if pieces else None
    transform = transform_of(spec, x.device)
    if transform is not None and len(pieces) < 2 and spec.scaling is not Scaling.DELAYED:
        return quantise_transformed(
            x, spec, transform, axis=axis, amax=amax, out=out, place=place, **draw
        )
    v = transformed(x, spec, axis)
    if spec.scaling is Scaling.DELAYED:
        observed = state.amax_for(spec, v)
        amax = observed if amax is None else amax
    if len(pieces) < 2:
        to = out if v is x else None
        return quantise(v, spec, axis=axis, amax=amax, out=to, place=place, **draw).to(x.dtype)
    result = torch.empty_like(x)
    for indices, at in pieces:
        piece = quantise(v[indices].contiguous(), spec, axis=axis, amax=amax, place=at, **draw)
        result[indices] = piece.to(x.dtype)
    return result


@beside_modes
def quantise_pair(
    x: Tensor,
    first: QuantSpec,
    second: QuantSpec,
    axes: tuple[int, int],
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`x` quantised for two products, each as `quantise_operand` returns it; None if the second needs its own read.

    It needs none if both are one tensor (a reused forward copy, a format without blocks), or if they differ only in the
    axis of their blocks.

    Args:
        x: as in `quantise_operand`.
        first: the operand of one product.
        second: the operand of the other.
        axes: the dimension that each product reduces over.
        out: where to write each copy, None means fresh memory; a shared copy is written to the second.
        amax: as in `quantise_operand`.
    """
    if not shares_read(first, second):
        return quantise_operand(
            x, first, axes[0], amax, out=out[0]
        ), x if not second.quantised else None
    if is_one_tensor(first, second) or x.numel() == 0:
        copy = quantise_operand(x, first, axes[0], amax, out=out[1])
        return copy, copy
    copies = [torch.empty_like(x) if buffer is None else buffer for buffer in out]
    return quantise_both(x, first, axes=axes, out=(copies[0], copies[1]), amax=amax)


def clipped_gradient(
    precision: ModulePrecision,
    slot: Slot,
    gradient: Tensor,
    x: Tensor,
    amax: Tensor | None = None,
) -> Tensor:
    """`clipped` for an operand of a forward product, under the scale of the whole tensor.

    `amax` is that of the whole tensor, if it is known.
    """
    spec = precision.spec(slot)
    if not spec.clip_gradient and spec.dge is None:
        return gradient
    axis = dim_of(slot.operand, spec)
    amax = whole_amax(precision.module, x, spec, axis) if amax is None else amax
    return clipped(gradient, x, spec, axis, amax)


def clipped(
    gradient: Tensor, x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None = None
) -> Tensor:
    """The gradient of `x`, zero where `x` saturated in the forward product if the slot sets `clip_gradient`.

    If the slot sets `dge`, the gradient is multiplied by the derivative of the estimator, in float32, and rounded.
    Under a Hadamard transform both are those of the transform. `amax` is as in `quantise_operand`.
    """
    if not spec.clip_gradient and spec.dge is None:
        return gradient
    v = transformed(x, spec, axis)
    amax = _delayed_amax(v, spec) if amax is None else amax
    if spec.dge is not None:
        factors = dge_factors(x, spec, spec.dge, axis % x.dim(), amax)
        gradient = factors.mul_(gradient).to(gradient.dtype)
    if not spec.clip_gradient:
        return gradient
    return gradient.masked_fill(saturated(v, spec, axis=axis, amax=amax), 0.0)


def turned_back(precision: ModulePrecision, slot: Slot, gradient: Tensor) -> Tensor:
    """The gradient by a linear layer's product of a forward copy, whose transform is undone along the input width.

    That is done in float32 and rounded to the gradient's dtype. By anything else than a transformed copy the gradient
    stays as it is.
    """
    copy = precision.spec(slot).copy
    if copy is None or not copy.is_transformed or gradient.numel() == 0:
        return gradient
    back = hadamard(gradient, block=copy.hadamard_block, left=copy.left, inverse=True)
    return back.to(gradient.dtype)


def scales(x: Tensor, spec: QuantSpec, axis: int) -> Scales:
    """The scales that `quantise_operand` applies to `x`, in the form of `quantexp.formats.encode`.

    With a Hadamard transform they are those of the transform. Call it after `quantise_operand`, in the same
    micro-batch.
    """
    v = transformed(x, spec, axis)
    return scales_of(v, spec, axis=axis, amax=_delayed_amax(v, spec))


def _delayed_amax(v: Tensor, spec: QuantSpec) -> Tensor | None:
    """The amax that scales v under delayed scaling; None under any other, by which v has its own."""
    if spec.scaling is not Scaling.DELAYED:
        return None
    amax = current_state().amax(spec)
    return finite_amax(v) if amax is None else amax
