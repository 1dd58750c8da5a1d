"""The options of one slot under a format: validates configured values and fills in defaults.

Each option keeps its origin (`Setting`), so that messages name the full key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from quantexp.errors import ConfigError
from quantexp.formats.spec import QuantSpec, resolve
from quantexp.formats.types import Family, Format, Hadamard, Rounding, ScaleRule, Scaling
from quantexp.quant.sites import GRADIENTS, Operand
from quantexp.schema import Rounded, Slot

Choice = TypeVar("Choice", bound=Enum)
Block = TypeVar("Block", int, int | None)

#: Target of a hifp8 operand's amax: the top of the 3-bit region, and of the 2-bit region for gradients.
FORWARD_AMAX = 15.0
GRADIENT_AMAX = 224.0

#: Options of a slot that are options of `quantexp.formats.quantise`.
QUANTISE_OPTIONS = ("block", "scale_rule", "rounding", "scaling", "saturate", "pre_scale")
#: The Hadamard transform precedes quantisation in any format.
TRANSFORM_OPTIONS = ("hadamard", "hadamard_block")
OPTIONS = (*QUANTISE_OPTIONS, "window", "clip_gradient", "dge", *TRANSFORM_OPTIONS, "of", "parts")
#: Iterations in the amax history of delayed scaling, unless a slot sets `window`.
WINDOW = 16
#: Elements of one Hadamard transform if neither the slot nor its format has a block.
HADAMARD_BLOCK = 32
_MOST_HADAMARD = 256


@dataclass(frozen=True)
class Setting:
    """What one place of the configuration sets for a slot, or for values outside of products; and its key."""

    key: str
    slot: Rounded


def scheme_spec(
    format_: Format, operand: Operand, options: Mapping[str, Setting] | None = None
) -> QuantSpec:
    """What a scheme does to an operand in this format, with these options set and its defaults for all others.

    Raises:
        ConfigError: an option the format does not have, or a value out of range.
    """
    options = options or {}
    known = {o for o in QUANTISE_OPTIONS if o in format_.options} | set(TRANSFORM_OPTIONS)
    known |= {"window"} if "scaling" in format_.options else set()
    known |= {"clip_gradient", "dge", "of", "parts"}
    for setting in options.values():
        refuse(format_.name, setting, tuple(o for o in OPTIONS if o not in known))
    scaling = chosen(options, "scaling", Scaling, _default_scaling(format_))
    values: dict[str, Any] = {
        "block": _power_of_two(options.get("block"), "block", format_.block, least=1),
        "scale_rule": chosen(options, "scale_rule", ScaleRule, _default_rule(format_)),
        "rounding": chosen(options, "rounding", Rounding, format_.rounding),
        "scaling": scaling,
        "saturate": _flag(options, "saturate", True),
        "pre_scale": _factor(options),
        "amax_target": None if scaling is Scaling.NONE else _amax_target(format_, operand),
    }
    spec = resolve(format_, **{name: values[name] for name in values.keys() & format_.options})
    hadamard, hadamard_block = _transform(options, format_)
    return replace(
        spec,
        window=_window(options, scaling),
        hadamard=hadamard,
        hadamard_block=hadamard_block,
    )


def _default_rule(format_: Format) -> ScaleRule:
    if format_.definition:
        return format_.scale_rule or ScaleRule.FLOOR
    return ScaleRule.RCEIL if format_.name.startswith("mxfp8") else ScaleRule.FLOOR


def _default_scaling(format_: Format) -> Scaling:
    is_of_table = format_.family is Family.HIF8 and not format_.definition
    return Scaling.CURRENT if is_of_table else format_.scaling


def _amax_target(format_: Format, operand: Operand) -> float | None:
    if format_.family is Family.HIF8 and not format_.definition:
        return GRADIENT_AMAX if operand in GRADIENTS else FORWARD_AMAX
    return format_.amax_target


def _flag(options: Mapping[str, Setting], option: str, default: bool) -> bool:
    setting = options.get(option)
    return default if setting is None else bool(getattr(setting.slot, option))


def _factor(options: Mapping[str, Setting]) -> bool | float:
    setting = options.get("pre_scale")
    if setting is None:
        return False
    assert isinstance(setting.slot, Slot)
    return setting.slot.pre_scale or False


def _window(options: Mapping[str, Setting], scaling: Scaling) -> int | None:
    setting = options.get("window")
    if setting is None:
        return WINDOW if scaling is Scaling.DELAYED else None
    assert isinstance(setting.slot, Slot)
    window = setting.slot.window
    assert window is not None
    if scaling is not Scaling.DELAYED:
        raise ConfigError(
            f"{setting.key}.window is for delayed scaling, got {window} with scaling {scaling.value}; remove it, or "
            "set scaling=delayed"
        )
    if window < 1:
        raise ConfigError(f"{setting.key}.window must be at least 1, got {window}")
    return window


def _transform(options: Mapping[str, Setting], format_: Format) -> tuple[Hadamard, int]:
    hadamard = chosen(options, "hadamard", Hadamard, Hadamard.NONE)
    setting = options.get("hadamard_block")
    if hadamard is not Hadamard.NONE:
        default = transform_block(format_)
        return hadamard, _power_of_two(setting, "hadamard_block", default, least=2)
    if setting is not None:
        assert isinstance(setting.slot, Slot)
        raise ConfigError(
            f"{setting.key}.hadamard_block is the size of a Hadamard transform, got {setting.slot.hadamard_block} "
            "without one; remove it, or set hadamard=deterministic or hadamard=random"
        )
    return Hadamard.NONE, 1


def transform_block(format_: Format) -> int:
    """Elements of one Hadamard transform that no option sets: those of the format's block, if it can have that size."""
    block = format_.block or HADAMARD_BLOCK
    is_possible = 2 <= block <= _MOST_HADAMARD and block & (block - 1) == 0
    return block if is_possible else HADAMARD_BLOCK


def _power_of_two(
    setting: Setting | None, option: str, default: Block, *, least: int
) -> int | Block:
    if setting is None:
        return default
    value: int = getattr(setting.slot, option)
    if value < least or value & (value - 1):
        at_least = "" if least == 1 else f" of at least {least}"
        raise ConfigError(f"{setting.key}.{option} must be a power of two{at_least}, got {value}")
    return value


def chosen(
    options: Mapping[str, Setting], option: str, choices: Iterable[Choice], default: Choice
) -> Choice:
    """The option's value as its Enum."""
    setting = options.get(option)
    if setting is None:
        return default
    value = getattr(setting.slot, option)
    for choice in choices:
        if choice.value == value:
            return choice
    ordered = (default, *(choice for choice in choices if choice != default))
    names = ", ".join(str(choice.value) for choice in ordered)
    raise ConfigError(f"{setting.key}.{option} must be one of {names}, got {value!r}")


def refuse(format_name: str, setting: Setting, options: tuple[str, ...]) -> None:
    """Refuse these options where they are set.

    Raises:
        ConfigError: naming the key and the format that has no such option.
    """
    for option in options:
        value = getattr(setting.slot, option, None)
        if value is not None:
            advice = (
                "choose the whole site with quant/linear=, quant/qk=, quant/pv= or quant/output="
            )
            raise ConfigError(
                f"{setting.key}.{option} does not apply to {format_name}, got {_shown(value)}; remove it"
                + (f", or {advice}" if isinstance(setting.slot, Slot) else "")
            )


def _shown(value: object) -> str:
    """A value for a message; parts as they are written."""
    if not isinstance(value, list):
        return repr(value)
    parts = (
        ", ".join(f"{key}: {each}" for key, each in asdict(part).items() if each) for part in value
    )
    return f"[{', '.join(f'{{{part}}}' for part in parts)}]"
