"""From the configuration of a site to the exact meaning of each of its slots.

A slot takes what its own keys say, then what the site's keys say (where both mean the same format), then the
scheme's default for the format: rceil for mxfp8 as the hardware does, floor for mxfp4 as OCP says, one current
power-of-two scale a tensor for hifp8. `reuse` is resolved to the forward slot it repeats. An option the format does
not have is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from quantexp.errors import ConfigError
from quantexp.formats.table import FORMATS, get_format
from quantexp.formats.types import Format, Rounding, ScaleRule, Scaling
from quantexp.quant.sites import GRADIENTS, PRODUCTS, Product, Site, slots_of
from quantexp.schema import LinearSite, PvSite, QkSite, QuantConfig, Rule, Slot

SiteConfig = LinearSite | QkSite | PvSite
Key = tuple[Product, str]
Choice = TypeVar("Choice", bound=Enum)

#: What a hifp8 operand's amax is brought to: the top of the 3-bit region, and of the 2-bit region for gradients.
FORWARD_AMAX = 15.0
GRADIENT_AMAX = 224.0

#: Values of `Slot.format` that are no number format of the table.
WORKING = "bf16"
REUSE = "reuse"

OPTIONS = ("block", "scale_rule", "rounding", "scaling", "saturate")


@dataclass(frozen=True)
class Operand:
    """How one operand of one product is held. `format` "bf16" is the working precision: untouched."""

    format: str
    #: The axis that blocks run along, in the product's words.
    axis: str
    block: int | None = None
    scale_rule: ScaleRule | None = None
    rounding: Rounding | None = None
    scaling: Scaling | None = None
    saturate: bool | None = None
    #: hifp8: what amax is brought to.
    amax_target: float | None = None
    #: The forward copy, straight through: quantised once, along the forward product's axis.
    reuse: bool = False

    @property
    def quantised(self) -> bool:
        """Whether the operand is anything but the working precision."""
        return self.format != WORKING


def format_choices() -> str:
    """What `Slot.format` may say, for messages."""
    aliases = [alias for f in FORMATS.values() for alias in f.aliases]
    return ", ".join(sorted({*FORMATS, *aliases, WORKING, REUSE}))


@dataclass(frozen=True)
class Setting:
    """What one place of the configuration says of a slot, and that place's key, for messages."""

    key: str
    slot: Slot


def site_configs(quant: QuantConfig) -> dict[Site, SiteConfig]:
    """The configuration of each site."""
    return {Site.LINEAR: quant.linear, Site.QK: quant.qk, Site.PV: quant.pv}


def site_settings(site: Site, config: SiteConfig, key: Key) -> list[Setting]:
    """What the configuration says of one slot, the first winning: the slot's own keys, then the site's."""
    product, operand = key
    slot = getattr(getattr(config, product.value), operand)
    own = f"quant.{site.value}.{product.value}.{operand}"
    return [Setting(own, slot), Setting(f"quant.{site.value}", config)]


def resolve_site(
    site: Site, config: SiteConfig, overlays: Mapping[Key, Sequence[Setting]] | None = None
) -> dict[Key, Operand]:
    """The six operands of a site, under overlays (rules), the first of which wins over all else.

    Raises:
        ConfigError: an unknown format, a value out of range, an option the format does not have, `reuse` where there
            is no forward copy.
    """
    over = overlays or {}
    operands = {
        key: _operand(site, key, [*over.get(key, ()), *site_settings(site, config, key)])
        for key in slots_of(site)
    }
    return {key: _reused(site, key, operand, operands) for key, operand in operands.items()}


def _operand(site: Site, key: Key, settings: list[Setting]) -> Operand:
    product, name = key
    axis = PRODUCTS[site][product].axis
    chosen = next((s for s in settings if s.slot.format is not None), None)
    if chosen is None or chosen.slot.format in (WORKING, REUSE):
        word = WORKING if chosen is None else str(chosen.slot.format)
        end = len(settings) if chosen is None else settings.index(chosen) + 1
        for setting in settings[:end]:
            if setting is chosen or not isinstance(setting.slot, Rule):  # rules may span more
                _refuse(word, setting, OPTIONS)
        if word == REUSE and product is Product.FPROP:
            assert chosen is not None
            raise ConfigError(
                f"{chosen.key}.format must not be reuse in the forward product, which has no earlier "
                f"copy; choose one of {format_choices()}"
            )
        return Operand(word, axis, reuse=word == REUSE)
    format_ = _format(chosen)
    return _with_options(format_, axis, name, _options_for(format_, settings))


def _format(setting: Setting) -> Format:
    try:
        return get_format(str(setting.slot.format))
    except ValueError as error:
        raise ConfigError(
            f"{setting.key}.format must be one of {format_choices()}, got {setting.slot.format!r}"
        ) from error


def _options_for(format_: Format, settings: list[Setting]) -> dict[str, Setting]:
    """Where each option comes from: what was set for another format does not carry over."""
    options: dict[str, Setting] = {}
    for setting in settings:
        named = setting.slot.format
        if named is not None and (named in (WORKING, REUSE) or get_format(named) != format_):
            break
        for option in OPTIONS:
            if getattr(setting.slot, option) is not None:
                options.setdefault(option, setting)
    return options


def _with_options(format_: Format, axis: str, name: str, options: dict[str, Setting]) -> Operand:
    absent = ("block", "scale_rule") if format_.name == "hifp8" else ("scaling", "saturate")
    for setting in options.values():
        _refuse(format_.name, setting, absent)
    if format_.name == "hifp8":
        saturate = options.get("saturate")
        return Operand(
            format_.name,
            axis,
            rounding=_chosen(options, "rounding", (Rounding.AWAY,)),
            scaling=_chosen(options, "scaling", (Scaling.CURRENT, Scaling.NONE, Scaling.EXACT)),
            saturate=True if saturate is None else saturate.slot.saturate,
            amax_target=GRADIENT_AMAX if name in GRADIENTS else FORWARD_AMAX,
        )
    rules = tuple(ScaleRule)
    default = ScaleRule.RCEIL if format_.name.startswith("mxfp8") else ScaleRule.FLOOR
    return Operand(
        format_.name,
        axis,
        block=_block(options.get("block"), format_),
        scale_rule=_chosen(options, "scale_rule", (default, *(r for r in rules if r != default))),
        rounding=_chosen(options, "rounding", (Rounding.EVEN, Rounding.AWAY)),
    )


def _refuse(format_name: str, setting: Setting, options: tuple[str, ...]) -> None:
    for option in options:
        value = getattr(setting.slot, option)
        if value is not None:
            raise ConfigError(
                f"{setting.key}.{option} does not apply to {format_name}, got {value!r}; remove it, or "
                "choose the whole site with quant/linear=, quant/qk= or quant/pv="
            )


def _block(setting: Setting | None, format_: Format) -> int | None:
    block = format_.block if setting is None else setting.slot.block
    if block is not None and (block < 1 or block & (block - 1)):
        assert setting is not None
        raise ConfigError(f"{setting.key}.block must be a power of two, got {block}")
    return block


def _chosen(options: dict[str, Setting], option: str, allowed: tuple[Choice, ...]) -> Choice:
    """The option's value as its Enum; the first allowed is the default."""
    setting = options.get(option)
    if setting is None:
        return allowed[0]
    value = getattr(setting.slot, option)
    for choice in allowed:
        if choice.value == value:
            return choice
    names = ", ".join(str(choice.value) for choice in allowed)
    raise ConfigError(f"{setting.key}.{option} must be one of {names}, got {value!r}")


def _reused(site: Site, key: Key, operand: Operand, operands: dict[Key, Operand]) -> Operand:
    if operand.format != REUSE:
        return operand
    product, name = key
    forward = operands.get((Product.FPROP, name))
    if forward is None:
        raise ConfigError(
            f"quant.{site.value}.{product.value}.{name}.format must not be reuse: {name} is no operand "
            f"of the forward product; choose one of {format_choices()}"
        )
    return replace(forward, reuse=True)
