"""The operands of matrix products that a captured tensor was, each with the axis of its blocks.

A tensor serves several products along different axes: a linear layer's input is fprop.x along the input width and
wgrad.x along tokens. Captured tensors lie as in `quantexp.analysis.tensors.operands`. Sequences are an axis of their
own, so blocks along tokens lie within one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantexp.analysis.tensors.inventory import experts_as_one
from quantexp.analysis.tensors.operands import operand_called
from quantexp.errors import CaptureError
from quantexp.model.decoder import OUTPUT
from quantexp.quant.sites import Operand, Site, Slot
from quantexp.quant.sites import slots_of as slots_of_site

#: Layer type -> the sites of its operands.
_SITES = {"linear": (Site.LINEAR,), "attention": (Site.QK, Site.PV), "norm": (Site.NORM,)}
#: The captured layouts of operands, as in messages, and their possible numbers of dimensions.
_LAYOUTS = {
    Operand.W: ("[output width, input width], or a norm's [width]", (1, 2)),
    Operand.Y: ("[tokens, sequences, width] or [tokens, sequences, heads, width]", (3, 4)),
    Operand.X: ("[tokens, sequences, width]", (2, 3)),
    Operand.G: ("[tokens, sequences, width]", (2, 3)),
    Operand.P: ("[sequences, heads, queries, keys]", (4,)),
    Operand.DS: ("[sequences, heads, queries, keys]", (4,)),
}
_HEADS_LAYOUT = ("[tokens, sequences, heads, head_dim]", (4,))


def slots_of(metadata: Mapping[str, Any]) -> list[Slot]:
    """The slots of a captured tensor, forward first; none for outputs and weight gradients."""
    layer_type = str(metadata.get("layer_type"))
    name = operand_called(layer_type, str(metadata.get("tensor")))
    is_output = metadata.get("module") == OUTPUT
    sites = (Site.OUTPUT,) if is_output else _SITES.get(layer_type, ())
    return [slot for site in sites for slot in slots_of_site(site) if slot.operand == name]


def module_of(metadata: Mapping[str, Any]) -> str:
    """The module, with all experts as one; the layer type if an old name does not have the module."""
    return experts_as_one(str(metadata.get("module") or metadata.get("layer_type")))


def check_layout(shape: tuple[int, ...], slot: Slot) -> None:
    """Refuse a tensor whose shape does not fit its operand's layout.

    Raises:
        CaptureError: another number of dimensions.
    """
    layout, allowed = _LAYOUTS.get(slot.operand, _HEADS_LAYOUT)
    if len(shape) not in allowed:
        raise CaptureError(f"must be {layout} as captured, got the shape {list(shape)}")
