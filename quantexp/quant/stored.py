"""Stored copies (`of: mxfp4_e2m1`): what is quantised is the tensor rounded to another format before. Needs no torch.

A forward pass keeps activations for the backward one, and sends those of routed experts, in fewer bits than the
products multiply (arXiv 2603.02731: MXFP4 beside products in FP8). Blocks of the stored copy run along the rows of its
tensor, so that a row may be sent by itself; the product's own run along the axis that it reduces. Rounding to nearest
makes every place that stores, sends or reads the tensor have the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quantexp.errors import ConfigError
from quantexp.formats.definitions.files import known_names
from quantexp.formats.spec import QuantSpec, get_format
from quantexp.formats.types import Axis, Family, Format, Of, Scaling
from quantexp.quant.choosing import Setting, scheme_spec
from quantexp.quant.sites import Operand, Site, Slot

#: The axis of a row of the operands that may be stored.
_ROW = {Operand.X: Axis.INPUT_WIDTH, Operand.G: Axis.OUTPUT_WIDTH}


def stored_copy(
    setting: Setting, name: str, slot: Slot, declared: Mapping[str, Format] | None
) -> QuantSpec | None:
    """The stored copy that a slot quantises, in a format with the scheme's defaults.

    None if a site's or a rule's setting comes to a slot that has none.

    Raises:
        ConfigError: no format, one that does not round to nearest in blocks of one row under scales of this tensor, or
            a slot that has no stored copy.
    """
    try:
        fmt = get_format(name, declared)
    except ValueError as error:
        names = ", ".join(sorted(known_names(declared)))
        raise ConfigError(
            f"{setting.key}.of must be {Of.HIGH}, {Of.FORWARD} or one of {names}, got {name!r}"
        ) from error
    if slot.site not in (Site.LINEAR, Site.OUTPUT) or slot.operand not in _ROW:
        if setting.key != f"quant.{slot}":
            return None
        raise ConfigError(
            f"{setting.key}.of must not be {name}: x and g of linear layers are stored or sent, got it for {slot}; "
            f"take {Of.HIGH}"
        )
    if fmt.family is Family.BF16:
        raise ConfigError(
            f"{setting.key}.of must not be {name}, which is the tensor itself; take {Of.HIGH}"
        )
    spec = replace(scheme_spec(fmt, slot.operand), axis=_ROW[slot.operand], left=slot.is_left)
    if spec.draws or fmt.across > 1 or spec.scaling is Scaling.DELAYED:
        raise ConfigError(
            f"{setting.key}.of must round to nearest, in blocks of one row and under scales of this tensor, got "
            f"{name}; choose another"
        )
    return spec
