"""Formats with the shipped schemes' options, for scoring tensors that no scheme quantises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quantexp.errors import ConfigError
from quantexp.formats.definitions.files import known_names
from quantexp.formats.spec import QuantSpec, get_format
from quantexp.formats.types import Family, Format
from quantexp.quant.choosing import scheme_spec
from quantexp.quant.sites import DGRAD_G, FPROP_X
from quantexp.quant.slots import WORKING


def scored_spec(
    name: str | Format,
    declared: Mapping[str, Format] | None = None,
    *,
    is_gradient: bool = False,
) -> QuantSpec:
    """The specification with the schemes' own options for the format: rceil for mxfp8, a current scale for hifp8, ...

    `declared` are the formats of the scheme's own, which may be meant.

    Raises:
        ConfigError: the format does not quantise.
    """
    try:
        fmt = get_format(name, declared)
    except ValueError:
        fmt = get_format(WORKING)
    if fmt.family is Family.BF16:
        names = {get_format(name, declared).name for name in known_names(declared)} - {WORKING}
        raise ConfigError(f"capture.format must be one of {', '.join(sorted(names))}, got {name!r}")
    slot = DGRAD_G if is_gradient else FPROP_X
    return replace(scheme_spec(fmt, slot.operand), axis=slot.axis)
