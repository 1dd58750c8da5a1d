"""Resolves the configuration of a site to the operands of its slots.

A slot's own keys take precedence over the site's keys (if both select the same format), which take precedence over
the scheme's default for the format: rceil for mxfp8 as the hardware does, floor for mxfp4 as OCP says, one current
power-of-two scale per tensor for hifp8, and the format's specification for all others. `reuse` resolves to the forward
slot that it repeats. An option that the format does not have is an error; it is never dropped.
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

#: Values of `Slot.format` that are not in the table of number formats.
WORKING = "bf16"
REUSE = "reuse"


@dataclass(frozen=True)
class Operand:
    """The format and options of one operand of one product. Format "bf16" is the working precision: not quantised."""

    format: str
    #: The axis that blocks run along, named as in `ProductShape`.
    axis: str
    block: int | None = None
    scale_rule: ScaleRule | None = None
    rounding: Rounding | None = None
    scaling: Scaling | None = None
    saturate: bool | None = None
    #: hifp8 and fp8: the amax after scaling.
    amax_target: float | None = None
    #: The forward copy, straight through: quantised once, along the forward product's axis.
    reuse: bool = False
    #: Only 3/4 of the operand is rounded; the product compensates.
    pre_scale: bool | None = None
    #: Delayed scaling: iterations in the amax history.
    window: int | None = None
    #: Forward product: the gradient is zero where the operand saturated.
    clip_gradient: bool | None = None
    #: The transform before quantisation, None for none, and its block.
    hadamard: Hadamard | None = None
    hadamard_block: int | None = None
    #: Whether this is the left operand of its product.
    left: bool = field(default=True, compare=False)
    #: Whether this is a layer's weight, which every micro-batch of a step multiplies.
    weight: bool = field(default=False, compare=False)
    #: Key of its random numbers and its amax history: the slot's label; for `reuse` the forward slot's.
    stream: str = field(default="", compare=False)

    @property
    def quantised(self) -> bool:
        """Whether the operand is quantised, as opposed to kept in the working precision."""
        return self.format != WORKING

    @property
    def options(self) -> dict[str, Any]:
        """Options for `quantexp.formats.quantise`, except format, axis and those from the step state."""
        options = {name: getattr(self, name) for name in (*QUANTISE_OPTIONS, "amax_target")}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def needs_step_state(self) -> bool:
        """Whether it needs random numbers, an amax history or a transform."""
        return (
            self.rounding is Rounding.STOCHASTIC
            or self.scaling is Scaling.DELAYED
            or self.hadamard is not None
        )

    @property
    def has_blocks(self) -> bool:
        """Whether its values depend on the axis, through blocks or a transform."""
        return self.block is not None or self.hadamard_block is not None

    @property
    def once_per_step(self) -> bool:
        """Whether every micro-batch of a step may multiply one copy of it.

        Random signs belong to the product; those of the other operand are drawn for each micro-batch.
        """
        return self.weight and self.hadamard is not Hadamard.RANDOM


def format_choices() -> str:
    """Allowed values of `Slot.format`, for messages."""
    aliases = [alias for f in FORMATS.values() for alias in f.aliases]
    return ", ".join(sorted({*FORMATS, *aliases, WORKING, REUSE}))


def site_configs(quant: QuantConfig) -> dict[Site, SiteConfig]:
    """The configuration of each site."""
    return {Site.LINEAR: quant.linear, Site.QK: quant.qk, Site.PV: quant.pv}


def site_settings(site: Site, config: SiteConfig, key: Key) -> list[Setting]:
    """The settings of one slot in order of precedence: the slot's own keys, then the site's."""
    product, operand = key
    slot = getattr(getattr(config, product.value), operand)
    own = f"quant.{site.value}.{product.value}.{operand}"
    return [Setting(own, slot), Setting(f"quant.{site.value}", config)]


def resolve_site(
    site: Site, config: SiteConfig, overlays: Mapping[Key, Sequence[Setting]] | None = None
) -> dict[Key, Operand]:
    """The six operands of a site, under overlays (rules); the first overlay takes precedence over all settings.

    Raises:
        ConfigError: an unknown format, a value out of range, an option the format does not have, `reuse` without a
            forward copy, a Hadamard transform that does not cancel.
    """
    over = overlays or {}
    operands = {
        key: _operand(site, key, [*over.get(key, ()), *site_settings(site, config, key)])
        for key in slots_of(site)
    }
    resolved = {
        key: _with_forward_copy(site, key, operand, operands) for key, operand in operands.items()
    }
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
            if setting is chosen or not isinstance(
                setting.slot, Rule
            ):  # rules may cover other slots
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
    """The origin of each option; options set for another format do not carry over."""
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
    """Whether to clip; a site's or a rule's setting applies to the forward product only."""
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
    """Refuse a transform of only one operand of a product: transforms cancel only if both are equal."""
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


def _with_forward_copy(
    site: Site, key: Key, operand: Operand, operands: dict[Key, Operand]
) -> Operand:
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
