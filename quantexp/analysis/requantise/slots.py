"""The operands of matrix products that a captured tensor was, each with the axis of its blocks.

A tensor serves several products along different axes: a linear layer's input is fprop.x along the input width and
wgrad.x along tokens. Captured tensors lie as in `quantexp.analysis.tensors.operands`. Sequences are an axis of their
own, so blocks along tokens lie within one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantexp.analysis.tensors.inventory import experts_as_one
from quantexp.analysis.tensors.operands import dimension_of, operand_called
from quantexp.errors import CaptureError
from quantexp.quant.sites import PRODUCTS, Product, Site

#: Layer type -> the sites of its operands.
_SITES = {"linear": (Site.LINEAR,), "attention": (Site.QK, Site.PV)}
#: The captured layouts of operands, as in messages, and their possible numbers of dimensions.
_LAYOUTS = {
    "w": ("[output width, input width]", (2,)),
    "x": ("[tokens, sequences, width]", (2, 3)),
    "g": ("[tokens, sequences, width]", (2, 3)),
    "P": ("[sequences, heads, queries, keys]", (4,)),
    "dS": ("[sequences, heads, queries, keys]", (4,)),
}
_HEADS_LAYOUT = ("[tokens, sequences, heads, head_dim]", (4,))


@dataclass(frozen=True)
class OperandSlot:
    """One operand of one product, and its layout in the captured tensor."""

    site: Site
    product: Product
    operand: str
    #: The reduction axis of the product, by its name in the product.
    axis: str
    #: The dimension of the captured tensor for this axis.
    dim: int
    #: Whether this is the left operand of its product.
    left: bool

    @property
    def label(self) -> str:
        """`linear.wgrad.x`."""
        return f"{self.site.value}.{self.product.value}.{self.operand}"


def slots_of(metadata: Mapping[str, Any]) -> list[OperandSlot]:
    """The slots of a captured tensor, forward first; none for outputs and weight gradients."""
    layer_type = str(metadata.get("layer_type"))
    name = operand_called(layer_type, str(metadata.get("tensor")))
    return [
        OperandSlot(
            site, product, name, shape.axis, dimension_of(shape.axis, name), name == shape.left
        )
        for site in _SITES.get(layer_type, ())
        for product, shape in PRODUCTS[site].items()
        if name is not None and name in (shape.left, shape.right)
    ]


def module_of(metadata: Mapping[str, Any]) -> str:
    """The module, with all experts as one; the layer type if an old name does not have the module."""
    return experts_as_one(str(metadata.get("module") or metadata.get("layer_type")))


def check_layout(shape: tuple[int, ...], slot: OperandSlot) -> None:
    """Refuse a tensor whose shape does not fit its operand's layout.

    Raises:
        CaptureError: another number of dimensions.
    """
    layout, allowed = _LAYOUTS.get(slot.operand, _HEADS_LAYOUT)
    if len(shape) not in allowed:
        raise CaptureError(f"must be {layout} as captured, got the shape {list(shape)}")
