"""The quantised operands of the products: names and dimensions of their captured tensors.

An operand is quantised along the axis that its product reduces over, so a tensor has one quantised form for each
product that it enters. The form is named after the tensor and the product, and its block scales after the form:

    input            input_fprop, input_wgrad                     input_fprop_scale
    grad_output      grad_output_dgrad, grad_output_wgrad         grad_output_dgrad_scale

    # T tokens (queries or keys), B sequences, H query heads, G key-value heads, D head_dim
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quantexp.formats.types import Hadamard, Rounding
from quantexp.quant.precision import Entry, ModulePrecision
from quantexp.quant.sites import PRODUCTS, Product, Site
from quantexp.quant.slots import Operand

SCALE = "_scale"

#: Operand -> the captured tensor.
SOURCES: dict[Site, dict[str, str]] = {
    Site.LINEAR: {"x": "input", "w": "weight", "g": "grad_output"},
    Site.QK: {"q": "query", "k": "key", "dS": "grad_scores"},
    Site.PV: {"P": "attn_weights", "v": "value", "dO": "grad_output"},
}
#: The dimensions of the captured tensors, by the names of the products' axes.
_DIMS = {
    "input": ("tokens", "sequences", "input_width"),
    "weight": ("output_width", "input_width"),
    "query": ("queries", "sequences", "heads", "head_dim"),
    "key": ("keys", "sequences", "groups", "head_dim"),
    "value": ("keys", "sequences", "groups", "head_dim"),
    "attn_weights": ("sequences", "heads", "queries", "keys"),
    "grad_scores": ("sequences", "heads", "queries", "keys"),
}
_GRAD_OUTPUT_DIMS = {
    Site.LINEAR: ("tokens", "sequences", "output_width"),
    Site.PV: ("queries", "sequences", "heads", "head_dim"),
}


@dataclass(frozen=True)
class QuantisedOperand:
    """One quantised operand of a product."""

    site: Site
    product: Product
    name: str
    operand: Operand

    @property
    def source(self) -> str:
        """The captured tensor that is quantised."""
        return SOURCES[self.site][self.name]

    @property
    def tensor(self) -> str:
        """The name of the quantised values."""
        return f"{self.source}_{self.product.value}"

    @property
    def slot(self) -> str:
        """The key in the metadata's `formats`."""
        return slot_key(self.site, self.product, self.name)

    @property
    def operation(self) -> str:
        """The pass of its product."""
        return operation_of(self.product)

    def dim(self, ndim: int) -> int:
        """The dimension of the captured tensor that the product reduces over; the tensor has `ndim` dimensions.

        The rows of a routed expert have no sequence dimension.
        """
        dims = _DIMS.get(self.source) or _GRAD_OUTPUT_DIMS[self.site]
        if ndim < len(dims):
            dims = tuple(name for name in dims if name != "sequences")
        return dims.index(self.operand.axis)

    @property
    def once(self) -> bool:
        """Whether the operand is the same in every micro-batch of an iteration, on every rank."""
        drawn = (
            self.operand.rounding is Rounding.STOCHASTIC or self.operand.hadamard is Hadamard.RANDOM
        )
        return self.source == "weight" and not drawn


def quantised_operand_of(entry: Entry) -> QuantisedOperand | None:
    """The quantised operand of a slot; None in the working precision, and for a reused forward copy."""
    return quantised_operand(entry.site, entry.product, entry.name, entry.operand)


def quantised_operand(
    site: Site, product: Product, name: str, operand: Operand
) -> QuantisedOperand | None:
    """The quantised operand of a slot given by its parts; None as for `quantised_operand_of`."""
    if not operand.quantised or operand.reuse:
        return None
    return QuantisedOperand(site, product, name, operand)


def slot_key(site: Site, product: Product, name: str) -> str:
    """`fprop.x` for linear, `qk.fprop.q` for attention."""
    key = f"{product.value}.{name}"
    return key if site is Site.LINEAR else f"{site.value}.{key}"


def operation_of(product: Product) -> str:
    """The pass of a product."""
    return "forward" if product is Product.FPROP else "backward"


def is_replaced(precision: ModulePrecision, operation: str, tensor: str) -> bool:
    """Whether every product that a tensor enters multiplies a quantised form of it.

    A weight that is listed for both passes counts separately for each pass.
    """
    operands = [
        entry.operand
        for entry in precision.entries()
        if SOURCES[entry.site][entry.name] == tensor
        and (tensor != "weight" or operation_of(entry.product) == operation)
    ]
    return bool(operands) and all(operand.quantised for operand in operands)


def source_of(tensor: str) -> str:
    """The source tensor of an operand or its scales; any other tensor is its own source."""
    return _SOURCE_OF.get(tensor.removesuffix(SCALE), tensor)


def _names() -> Iterator[tuple[str, str]]:
    for site, products in PRODUCTS.items():
        for product, shape in products.items():
            for name in (shape.left, shape.right):
                source = SOURCES[site][name]
                yield f"{source}_{product.value}", source


_SOURCE_OF = dict(_names())
#: The names of all quantised operands.
OPERAND_TENSORS = tuple(_SOURCE_OF)


def scale_shape(shape: tuple[int, ...], dim: int, block: int) -> tuple[int, ...]:
    """The shape of the block scales: one scale for each block."""
    return (*shape[:dim], -(-shape[dim] // block), *shape[dim + 1 :])


def scale_sample(
    sample: dict[str, Any] | None, shape: tuple[int, ...], dim: int, block: int
) -> dict[str, Any] | None:
    """The block scales of a sample of the values, as in the metadata."""
    if sample is None:
        return None
    indices = sample["indices"]
    if sample["axis"] == dim:
        indices = sorted({index // block for index in indices})
    return {**sample, "indices": indices, "shape": list(scale_shape(shape, dim, block))}
