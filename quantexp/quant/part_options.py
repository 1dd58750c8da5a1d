"""The parts of a slot (`quant.linear.fprop.x.parts`): validates them, and resolves each to a `Part`. Needs no torch.

An operand with parts is multiplied as the sum of its parts and of what remains (`quantexp.quant.parts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quantexp.errors import ConfigError
from quantexp.formats.definitions.files import known_names
from quantexp.formats.spec import LEFT_OUT, Part, QuantSpec, get_format
from quantexp.formats.types import Axis, Family, Format, Scaling, Take
from quantexp.quant.choosing import Setting, scheme_spec
from quantexp.quant.sites import FPROP_K, Operand, Site, Slot
from quantexp.schema import Part as PartConfig
from quantexp.schema import Slot as SlotConfig

#: The axes that a part of an operand may be taken along.
_AXES = {
    Operand.X: (Axis.TOKENS, Axis.INPUT_WIDTH),
    Operand.G: (Axis.TOKENS, Axis.OUTPUT_WIDTH),
    Operand.W: (Axis.INPUT_WIDTH, Axis.OUTPUT_WIDTH),
    Operand.K: (Axis.KEYS,),
}


def parts_of(
    setting: Setting, spec: QuantSpec, slot: Slot, declared: Mapping[str, Format] | None
) -> tuple[Part, ...]:
    """The parts that a setting gives to a slot with this specification.

    Raises:
        ConfigError: a part that is none, or that does not go with the slot or its other options.
    """
    assert isinstance(setting.slot, SlotConfig)
    configs, key = setting.slot.parts or [], f"{setting.key}.parts"
    if configs:
        _check_slot(key, slot)
    parts = tuple(
        _part(f"{key}[{index}]", part, slot, declared) for index, part in enumerate(configs)
    )
    is_summed = len(parts) > sum(part.spec is None for part in parts)
    for option, is_set, why in (
        (
            "hadamard",
            spec.is_transformed and is_summed,
            "a part is not transformed, so the transforms would not cancel in its product",
        ),
        (
            "pre_scale",
            spec.is_pre_scaled and is_summed,
            "its inverse would also multiply the products of the parts, which have no such factor",
        ),
        (
            f"of={'forward' if spec.copy else 'a stored copy'}",
            spec.of is not None and bool(parts),
            "parts are taken of the tensor in high precision",
        ),
        (
            "clip_gradient",
            spec.clip_gradient and bool(parts),
            "what saturates is the remainder, not the operand",
        ),
        (
            "dge",
            spec.dge is not None and bool(parts),
            "its derivative is that of one rounding",
        ),
        (
            "scaling=delayed",
            spec.scaling is Scaling.DELAYED and bool(parts),
            "its history would be that of the remainder, which no capture has",
        ),
    ):
        if is_set:
            raise ConfigError(f"{key} of {slot} do not go with {option}: {why}; remove one of them")
    return parts


def part_axes(part: Part, operand: str) -> tuple[Axis, ...]:
    """The axes that a part of an operand is taken over: that of a mean, or both."""
    if part.take is Take.MEAN and part.along is not None:
        return (part.along,)
    return _AXES[Operand(operand)]


def _check_slot(key: str, slot: Slot) -> None:
    """Refuse a slot that cannot be a sum of parts."""
    if slot.site not in (Site.LINEAR, Site.OUTPUT) and slot != FPROP_K:
        raise ConfigError(
            f"{key} are for linear layers, whose products add them up, and for qk.fprop.k, got them for {slot}; remove "
            "them"
        )


def _part(key: str, config: PartConfig, slot: Slot, declared: Mapping[str, Format] | None) -> Part:
    takes = [take.value for take in Take]
    if config.take not in takes:
        raise ConfigError(f"{key}.take must be one of {', '.join(takes)}, got {config.take!r}")
    take = Take(config.take)
    of_keys = PartConfig(Take.MEAN.value, Axis.KEYS.value, format=LEFT_OUT)
    if slot == FPROP_K and config != of_keys:
        raise ConfigError(
            f"{key} of {slot} must be {{take: mean, along: keys, format: none}}, which changes nothing after the "
            f"softmax, got take={config.take}, along={config.along}, number={config.number}, share={config.share}, "
            f"from_error={str(config.from_error).lower()} and format={config.format}"
        )
    has_axis = take in (Take.MEAN, Take.CHANNELS)
    axes = [axis.value for axis in _AXES[slot.operand]] if has_axis else []
    if axes and config.along not in axes:
        raise ConfigError(
            f"{key}.along must be an axis of {slot.operand}, {' or '.join(axes)}, got {config.along!r}"
        )
    counts = [name for name in ("number", "share") if getattr(config, name) is not None]
    unused = ["along"] if not has_axis and config.along is not None else []
    unused += counts if take is Take.MEAN else []
    if unused:
        raise ConfigError(
            f"{key}.{unused[0]} has no meaning with take={take.value}, got {getattr(config, unused[0])}; remove it"
        )
    if take is not Take.MEAN and len(counts) != 1:
        counted = "dimensions" if take is Take.LOW_RANK else take.value
        raise ConfigError(
            f"{key} must have a number of {counted} or their share of all, and not both, got number={config.number} "
            f"and share={config.share}"
        )
    return Part(
        take,
        None if slot == FPROP_K else _spec(key, config.format, slot, declared),
        Axis(str(config.along)) if has_axis else None,
        config.number,
        config.share,
        config.from_error,
    )


def _spec(
    key: str, name: str | None, slot: Slot, declared: Mapping[str, Format] | None
) -> QuantSpec:
    """How a part is rounded: to its format with the scheme's defaults, along the product's axis."""
    try:
        fmt = get_format(str(name), declared)
    except ValueError as error:
        names = ", ".join(sorted(known_names(declared)))
        raise ConfigError(f"{key}.format must be one of {names}, got {name!r}") from error
    is_high = fmt.family is Family.BF16
    spec = replace(
        QuantSpec(fmt) if is_high else scheme_spec(fmt, slot.operand),
        axis=slot.axis,
        left=slot.is_left,
        weight=slot.operand is Operand.W,
    )
    if spec.draws or fmt.across > 1 or spec.scaling is Scaling.DELAYED:
        raise ConfigError(
            f"{key}.format must round to nearest, in blocks of one row and under scales of this tensor, got "
            f"{fmt.name}; choose another"
        )
    return spec
