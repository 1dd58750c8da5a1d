"""From the configuration of a site to the exact meaning of each of its slots.

A slot takes what its own keys say, then what the site's keys say (where both mean the same format), then the
scheme's default for the format: rceil for mxfp8 as the hardware does, floor for mxfp4 as OCP says, one current
power-of-two scale a tensor for hifp8, and for all else what the format's specification says. `reuse` is resolved to
the forward slot it repeats. An option the format does not have is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantexp.errors import ConfigError
from quantexp.formats.table import FORMATS, get_format
from quantexp.formats.types import Format, Hadamard, Rounding, ScaleRule, Scaling
from quantexp.quant.choosing import OPTIONS, QUANTISE_OPTIONS, Setting, chosen_options, refuse
from quantexp.quant.sites import PRODUCTS, Product, Site, slots_of
from quantexp.schema import LinearSite, PvSite, QkSite, QuantConfig, Rule

SiteConfig = LinearSite | QkSite | PvSite
Key = tuple[Product, str]

#: Values of `Slot.format` that are no number format of the table.
WORKING = "bf16"
REUSE = "reuse"


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
    #: hifp8 and fp8: what amax is brought to.
    amax_target: float | None = None
    #: The forward copy, straight through: quantised once, along the forward product's axis.
    reuse: bool = False
    #: Only 3/4 of the operand is rounded; the product makes up for it.
    pre_scale: bool | None = None
    #: Delayed scaling: iterations whose amax counts.
    window: int | None = None
    #: Forward product: no gradient passes where the operand saturated.
    clip_gradient: bool | None = None
    #: The transform beforehand, None for none, and its block.
    hadamard: Hadamard | None = None
    hadamard_block: int | None = None
    #: Whether it is the left operand of its product.
    left: bool = field(default=True, compare=False)
    #: Whether it is a layer's weight, which every micro-batch of a step multiplies.
    weight: bool = field(default=False, compare=False)
    #: Whose random numbers and history of amax it takes: the slot's label; the forward slot's for `reuse`.
    stream: str = field(default="", compare=False)

    @property
    def quantised(self) -> bool:
        """Whether the operand is anything but the working precision."""
        return self.format != WORKING

    @property
    def options(self) -> dict[str, Any]:
        """What `quantexp.formats.quantise` is told, but for format, axis and what depends on the moment."""
        given = {name: getattr(self, name) for name in (*QUANTISE_OPTIONS, "amax_target")}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def depends_on_moment(self) -> bool:
        """Whether it takes random numbers, a history of amax or a transform."""
        return (
            self.rounding is Rounding.STOCHASTIC
            or self.scaling is Scaling.DELAYED
            or self.hadamard is not None
        )

    @property
    def has_blocks(self) -> bool:
        """Whether its values depend on the axis: it has blocks, or a transform."""
        return self.block is not None or self.hadamard_block is not None

    @property
    def once_a_step(self) -> bool:
        """Whether every micro-batch of a step may multiply one copy of it.

        Random signs are the product's, and the other operand's are drawn for each micro-batch.
        """
        return self.weight and self.hadamard is not Hadamard.RANDOM


def format_choices() -> str:
    """What `Slot.format` may say, for messages."""
    aliases = [alias for f in FORMATS.values() for alias in f.aliases]
    return ", ".join(sorted({*FORMATS, *aliases, WORKING, REUSE}))


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
            is no forward copy, a Hadamard transform that does not cancel.
    """
    over = overlays or {}
    operands = {
        key: _operand(site, key, [*over.get(key, ()), *site_settings(site, config, key)])
        for key in slots_of(site)
    }
    resolved = {key: _reused(site, key, operand, operands) for key, operand in operands.items()}
    for product, shape in PRODUCTS[site].items():
        _check_transforms(
            site, product, resolved[product, shape.left], resolved[product, shape.right]
        )
    return resolved


def _operand(site: Site, key: Key, settings: list[Setting]) -> Operand:
    product, name = key
    axis = PRODUCTS[site][product].axis
    chosen = next((s for s in settings if s.slot.format is not None), None)
    if chosen is None or chosen.slot.format in (WORKING, REUSE):
        word = WORKING if chosen is None else str(chosen.slot.format)
        end = len(settings) if chosen is None else settings.index(chosen) + 1
        for setting in settings[:end]:
            if setting is chosen or not isinstance(setting.slot, Rule):  # rules may span more
                refuse(word, setting, OPTIONS)
        if word == REUSE and product is Product.FPROP:
            assert chosen is not None
            raise ConfigError(
                f"{chosen.key}.format must not be reuse in the forward product, which has no earlier "
                f"copy; choose one of {format_choices()}"
            )
        return Operand(word, axis, reuse=word == REUSE)
    format_ = _format(chosen)
    options = _options_for(format_, settings)
    operand = Operand(
        format_.name,
        axis,
        **chosen_options(format_, name, options),
        left=name == PRODUCTS[site][product].left,
        weight=name == "w",
    )
    clipped = _clip_gradient(options.get("clip_gradient"), operand, site, key)
    return replace(operand, clip_gradient=clipped)


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


def _clip_gradient(setting: Setting | None, operand: Operand, site: Site, key: Key) -> bool | None:
    """Whether to clip; what a site or a rule says holds for its forward product."""
    product, name = key
    if setting is None or not setting.slot.clip_gradient:
        return None
    where = f"{setting.key}.clip_gradient"
    if product is not Product.FPROP:
        if setting.key == f"quant.{site.value}.{product.value}.{name}":
            raise ConfigError(
                f"{where} is for the operands of the forward product, whose quantisation is derived, got true; "
                f"remove it, or set quant.{site.value}.fprop"
            )
        return None
    if operand.hadamard is not None:
        raise ConfigError(
            f"{where} has no meaning under a Hadamard transform, whose elements are others than the operand's, got "
            "true; remove one of them"
        )
    if not _can_saturate(operand):
        how = operand.scale_rule or operand.scaling
        raise ConfigError(
            f"{where} has no meaning for {operand.format} with {how}, under which nothing saturates, got true; remove "
            "it"
        )
    return True


def _can_saturate(operand: Operand) -> bool:
    if operand.scale_rule is not None:
        return operand.scale_rule in (ScaleRule.FLOOR, ScaleRule.EVEN) and not operand.pre_scale
    blocks_saturate = operand.block is not None and not operand.pre_scale
    return blocks_saturate or operand.scaling in (Scaling.NONE, Scaling.DELAYED)


def _check_transforms(site: Site, product: Product, left: Operand, right: Operand) -> None:
    """Both operands of a product, or neither: only then the transforms cancel."""
    if (left.hadamard, left.hadamard_block) == (right.hadamard, right.hadamard_block):
        return
    shape = PRODUCTS[site][product]
    got = ", ".join(
        f"{name} {_transform_words(operand)}"
        for name, operand in ((shape.left, left), (shape.right, right))
    )
    raise ConfigError(
        f"quant.{site.value}.{product.value} must have the same hadamard and hadamard_block for both operands, so "
        f"that they cancel in the product, got {got}; a slot in the working precision has none"
    )


def _transform_words(operand: Operand) -> str:
    if operand.hadamard is None:
        return "none"
    return f"{operand.hadamard.value} in blocks of {operand.hadamard_block}"


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
    if forward.hadamard is not None:
        raise ConfigError(
            f"quant.{site.value}.{product.value}.{name}.format must not be reuse: the forward copy of {name} is "
            f"Hadamard-transformed along {forward.axis}, which {product.value} does not reduce over; give it a format, "
            "or the forward product no transform"
        )
    return replace(forward, reuse=True, clip_gradient=None)
