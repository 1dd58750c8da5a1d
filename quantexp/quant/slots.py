"""Resolves the configuration of a site to the specifications of its slots.

A slot's own keys take precedence over the site's keys (if both select the same format), which take precedence over
the scheme's default for the format: rceil for mxfp8 as the hardware does, floor for mxfp4 as OCP says, one current
power-of-two scale per tensor for hifp8, and the format's specification for all others. `reuse` resolves to the forward
slot that it repeats. An option that the format does not have is an error; it is never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quantexp.errors import ConfigError
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.definitions.files import NAME, known_names
from quantexp.formats.definitions.python import PYTHON, is_python, source_files
from quantexp.formats.spec import QuantSpec, get_format
from quantexp.formats.table import BY_ANY_NAME
from quantexp.formats.types import STOCK, Format, Hadamard, Of
from quantexp.quant.choosing import OPTIONS, Setting, refuse, scheme_spec
from quantexp.quant.sites import (
    Operand,
    Product,
    Site,
    Slot,
    operands_of,
    slots_of,
)
from quantexp.quant.slot_checks import (
    check_clipping,
    check_norms,
    clips_gradient,
    power_of,
    with_softmax,
)
from quantexp.schema import LinearSite, NormSite, PvSite, QkSite, QuantConfig, Rule
from quantexp.schema import Slot as SlotConfig

SiteConfig = LinearSite | QkSite | PvSite | NormSite

#: The working precision, as a format: the slot is not quantised.
WORKING = "bf16"
#: A slot that multiplies the forward copy.
REUSE = "reuse"


def declared_formats(quant: QuantConfig) -> Mapping[str, Format]:
    """The formats that a scheme declares, by name.

    Raises:
        ConfigError: a definition is wrong, or has the name of a format of the table.
    """
    declared = {}
    for name, content in quant.formats.items():
        key = f"quant.formats.{name}"
        if not (NAME.fullmatch(name) or is_python(name)):
            raise ConfigError(
                f"{key} must have a name of 1 to 64 letters, digits and underscores, which file names may hold"
            )
        if name in BY_ANY_NAME or name == REUSE:
            raise ConfigError(f"{key} has the name of a format of quantexp; give it another name")
        if not isinstance(content, dict):
            raise ConfigError(f"{key} must be keys with values, got {content!r}")
        try:
            declared[name] = declared_format(name, content)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    return declared


def python_sources(quant: QuantConfig) -> dict[str, str]:
    """The sources of each format in Python that a scheme declares, by its name, those that it imports by module."""
    return {
        (name if index == 0 else module): file.read_text(encoding="utf-8", errors="replace")
        for name, content in quant.formats.items()
        if PYTHON in content
        for index, (module, file) in enumerate(source_files(content[PYTHON]).items())
    }


def format_choices(declared: Mapping[str, Format] | None = None) -> str:
    """Allowed values of `Slot.format`, for messages."""
    return ", ".join(sorted({*known_names(declared), WORKING, REUSE}))


def site_configs(quant: QuantConfig) -> dict[Site, SiteConfig]:
    """The configuration of each site."""
    return {
        Site.LINEAR: quant.linear,
        Site.QK: quant.qk,
        Site.PV: quant.pv,
        Site.OUTPUT: quant.output,
        Site.NORM: quant.norm,
    }


def site_settings(config: SiteConfig, slot: Slot) -> list[Setting]:
    """The settings of one slot in order of precedence: the slot's own keys, then the site's."""
    own = getattr(getattr(config, slot.product.value), slot.operand.value)
    return [Setting(f"quant.{slot}", own), Setting(f"quant.{slot.site.value}", config)]


def resolve_site(
    site: Site,
    config: SiteConfig,
    overlays: Mapping[Slot, Sequence[Setting]] | None = None,
    declared: Mapping[str, Format] | None = None,
) -> dict[Slot, QuantSpec]:
    """The slots of a site, under overlays (rules); the first overlay takes precedence over all settings.

    `declared` are the formats of the scheme's own (`declared_formats`).

    Raises:
        ConfigError: an unknown format, a value out of range, an option the format does not have, `reuse` without a
            forward copy, a Hadamard transform that does not cancel, an option that a norm cannot have.
    """
    over = overlays or {}
    resolved: dict[Slot, QuantSpec] = {}
    for slot in slots_of(site):
        settings = [*over.get(slot, ()), *site_settings(config, slot)]
        forward = resolved.get(slot._replace(product=Product.FPROP))
        own = _resolved(slot, settings, forward, declared)
        own = own or _forward_copy(slot, forward, f"quant.{slot}.format", REUSE)
        resolved[slot] = with_softmax(own, settings, slot)
    if site is Site.NORM:
        check_norms(resolved)
    check_clipping(resolved)
    for product in {slot.product: None for slot in resolved}:
        _check_transforms(*((slot, resolved[slot]) for slot in operands_of(site, product)))
    return resolved


def _resolved(
    slot: Slot,
    settings: list[Setting],
    forward: QuantSpec | None,
    declared: Mapping[str, Format] | None,
) -> QuantSpec | None:
    """The specification of a slot whose operand is `forward` in the forward product; None for the forward copy."""
    named = next((s for s in settings if s.slot.format is not None), None)
    if named is None or named.slot.format in (WORKING, REUSE):
        word = WORKING if named is None else str(named.slot.format)
        end = len(settings) if named is None else settings.index(named) + 1
        for setting in settings[:end]:
            if setting is named or not isinstance(
                setting.slot, Rule
            ):  # rules may cover other slots
                refuse(word, setting, OPTIONS)
        if word == WORKING:
            return working_spec(slot)
        if slot.product is Product.FPROP:
            assert named is not None
            raise ConfigError(
                f"{named.key}.format must not be reuse in the forward product, which has no earlier "
                f"copy; choose one of {format_choices()}"
            )
        return None
    format_ = _format(named, declared)
    _check_rows(named, format_, slot)
    options = _options_for(format_, settings, declared)
    spec = replace(
        scheme_spec(format_, slot.operand, options),
        axis=slot.axis,
        left=slot.is_left,
        weight=slot.operand is Operand.W,
        of=_requantised(options, slot, forward, declared),
    )
    spec = replace(
        spec,
        clip_gradient=clips_gradient(options.get("clip_gradient"), spec, slot),
        dge=power_of(options.get("dge"), spec, slot),
    )
    if "parts" not in options:
        return spec
    from quantexp.quant.part_options import parts_of

    return replace(spec, parts=parts_of(options["parts"], spec, slot, declared))


def working_spec(slot: Slot) -> QuantSpec:
    """The specification of a slot that is not quantised."""
    return QuantSpec(get_format(WORKING), axis=slot.axis)


def _format(setting: Setting, declared: Mapping[str, Format] | None) -> Format:
    try:
        return get_format(str(setting.slot.format), declared)
    except ValueError as error:
        raise ConfigError(
            f"{setting.key}.format must be one of {format_choices(declared)}, got {setting.slot.format!r}"
        ) from error


def _check_rows(chosen: Setting, format_: Format, slot: Slot) -> None:
    """Refuse blocks of several rows for all operands but weights: rows of tokens may be those of several sequences."""
    if format_.across > 1 and slot.operand is not Operand.W:
        raise ConfigError(
            f"{chosen.key}.format {format_.name} has blocks of {format_.across} rows, which are for weights, got it "
            f"for {slot}; give {slot.operand} a format with blocks of one row"
        )


def _options_for(
    format_: Format, settings: list[Setting], declared: Mapping[str, Format] | None
) -> dict[str, Setting]:
    """The origin of each option; options set for another format do not carry over."""
    options: dict[str, Setting] = {}
    for setting in settings:
        named = setting.slot.format
        if named is not None and (
            named in (WORKING, REUSE) or get_format(named, declared) != format_
        ):
            break
        for option in OPTIONS:
            if getattr(setting.slot, option) is not None:
                options.setdefault(option, setting)
    return options


def _requantised(
    options: Mapping[str, Setting],
    slot: Slot,
    forward: QuantSpec | None,
    declared: Mapping[str, Format] | None,
) -> QuantSpec | None:
    """The copy that a slot quantises again; None means the tensor in high precision.

    A site's or a rule's `forward` applies to the operands of backward products that the forward product has. One that
    is in the working precision there is the tensor in high precision. Its format applies to x and g.
    """
    setting = options.get("of")
    if setting is None:
        return None
    assert isinstance(setting.slot, SlotConfig)
    named = str(setting.slot.of)
    if named not in list(Of):
        from quantexp.quant.stored import stored_copy

        return stored_copy(setting, named, slot, declared)
    if named == Of.HIGH:
        return None
    is_first = slot.product is Product.FPROP
    if setting.key != f"quant.{slot}" and (is_first or forward is None):
        return None
    if is_first:
        raise ConfigError(
            f"{setting.key}.of must not be forward in the forward product, which has no earlier copy; remove it"
        )
    copy = _forward_copy(slot, forward, f"{setting.key}.of", Of.FORWARD)
    if slot.operand is Operand.P:
        raise ConfigError(
            f"{setting.key}.of must not be forward for {slot}: P is computed anew in the backward pass, tile by tile; "
            f"take high, or quant.{slot}.format=reuse"
        )
    return copy if copy.quantised else None


def _check_transforms(left: tuple[Slot, QuantSpec], right: tuple[Slot, QuantSpec]) -> None:
    """Refuse a transform of only one operand of a product: transforms cancel only if both are equal.

    That of a forward copy is along another axis, and the gradient is transformed back.
    """
    slot = left[0]
    first, second = (
        (Hadamard.NONE, 1) if spec.reuse else (spec.hadamard, spec.hadamard_block)
        for _, spec in (left, right)
    )
    if first == second:
        return
    got = ", ".join(f"{s.operand} {_transform_words(spec)}" for s, spec in (left, right))
    raise ConfigError(
        f"quant.{slot.site.value}.{slot.product.value} must have the same hadamard and hadamard_block for both "
        f"operands, so that they cancel in the product, got {got}; a slot in the working precision has none"
    )


def _transform_words(spec: QuantSpec) -> str:
    if not spec.is_transformed or spec.reuse:
        return "none"
    return f"{spec.hadamard.value} in blocks of {spec.hadamard_block}"


def _forward_copy(slot: Slot, forward: QuantSpec | None, key: str, value: str) -> QuantSpec:
    """The forward copy of an operand, for a slot whose `key` has this value."""
    where = f"{key} must not be {value}"
    if forward is None:
        raise ConfigError(
            f"{where}: {slot.operand} is no operand of the forward product; "
            + (f"choose one of {format_choices()}" if value == REUSE else "take high")
        )
    if forward.is_transformed and slot.site in (Site.QK, Site.PV):
        raise ConfigError(
            f"{where}: the forward copy of {slot.operand} is Hadamard-transformed along {forward.axis}, and "
            "attention's gradients are not transformed back; take another, or give the forward product no transform"
        )
    if forward.hadamard is Hadamard.RANDOM:
        raise ConfigError(
            f"{where}: the forward copy of {slot.operand} has random signs, other ones in each micro-batch, and one "
            "product of an expert adds several; give the forward product hadamard=deterministic, or take another"
        )
    if forward.num_pieces > 1:
        raise ConfigError(
            f"{where}: the forward copy of {slot.operand} is a sum of parts along {forward.axis}, which "
            f"{slot.product.value} does not reduce over; give it a format, and parts of its own"
        )
    if forward.softmax.unnormalised:
        raise ConfigError(
            f"{where}: the forward copy of {slot.operand} is exp(S - m), not divided by its row's sum; give it a "
            "format, or remove unnormalised"
        )
    return replace(forward, reuse=True, clip_gradient=False, dge=None, softmax=STOCK)
