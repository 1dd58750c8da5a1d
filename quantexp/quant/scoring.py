"""Formats with the shipped schemes' options, for scoring tensors that no scheme quantises."""

from __future__ import annotations

from quantexp.errors import ConfigError
from quantexp.formats.spec import QuantSpec
from quantexp.formats.table import FORMATS, get_format
from quantexp.formats.types import Family
from quantexp.quant.sites import Operand, Product, Site, Slot
from quantexp.quant.slots import WORKING, resolve_site
from quantexp.schema import LinearSite


def scored_spec(format_name: str, *, is_gradient: bool = False) -> QuantSpec:
    """The specification with the schemes' own options for the format: rceil for mxfp8, a current scale for hifp8, ...

    Raises:
        ConfigError: the format does not quantise.
    """
    names = [name for name, fmt in FORMATS.items() if fmt.family is not Family.BF16]
    try:
        name = get_format(format_name).name
    except ValueError:
        name = WORKING
    if name not in names:
        allowed = ", ".join(sorted(names))
        raise ConfigError(f"capture.format must be one of {allowed}, got {format_name!r}")
    product, operand = (Product.DGRAD, Operand.G) if is_gradient else (Product.FPROP, Operand.X)
    return resolve_site(Site.LINEAR, LinearSite(format=name))[Slot(Site.LINEAR, product, operand)]
