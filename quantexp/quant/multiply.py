"""One matrix product of quantised operands, from the tensors in high precision to the result.

    quantise    each operand according to its slot, unless its copy exists
    show        both, before and after, to the hooks: `call_operand_hooks`
    announce    the product to the proof of engagement: `product_context`
    multiply    and compensate operands scaled by 3/4

All nine products take these steps: those of `quantexp.quant.linear` and of the plain attention in `multiply_operands`;
the tiled attention, which quantises once what it multiplies in parts, by `quantised_operand` and `multiply`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.formats import QuantSpec
from quantexp.quant.hooks import Layout, call_operand_hooks, same_layout
from quantexp.quant.operand import quantise_operand
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import ProductContext, product_context
from quantexp.quant.sites import Product, Site, Slot, dim_of, operands_of

#: The factor of a product for each operand scaled by 3/4 (arXiv 2502.20586).
POST_SCALE = 4.0 / 3.0


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
    sequences: int = 1,
) -> Tensor:
    """`scale` times the product of both operands, as the module declares them.

    `sequences` are interleaved along the reduced axis, for products over tokens.
    """

    def source(factor: Factor) -> Tensor:
        matrix = factor.matrix(factor.x)
        return matrix.flatten(0, -2) if is_one else matrix  # also of an expert without tokens

    a, b = (
        factor.matrix(
            quantised_operand(precision, factor.slot, factor.x, factor.captured, factor.copy)
        )
        for factor in (left, right)
    )
    is_one = b.dim() == 2
    context = ProductContext(
        precision.module,
        left.slot.site,
        left.slot.product,
        sequences,
        lambda: (source(left), source(right)),
    )
    return multiply(context, a, b, scale * product_scale(precision, context.site, context.product))


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
    if copy is None:
        spec = precision.spec(slot)
        copy = quantise_operand(x, spec, dim_of(slot.operand, spec))
    if is_shown:
        call_operand_hooks(precision, slot, x, copy, captured)
    return copy


def product_scale(precision: ModulePrecision, site: Site, product: Product) -> float:
    """The factor that compensates operands pre-scaled by 3/4."""
    return post_scale(*(precision.spec(slot) for slot in operands_of(site, product)))


def post_scale(*specs: QuantSpec) -> float:
    """1, 4/3 or 16/9."""
    return POST_SCALE ** sum(spec.pre_scale for spec in specs)


def multiply(context: ProductContext, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` a b, with the scale applied before the product is rounded to its dtype.

    Args:
        context: identifies the product.
        a: [..., K] with a matrix b, [N, T, K] with a stack of matrices.
        b: [K, M] or [N, K, M].
        scale: in float32.
    """
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
