"""The options of one quantisation, validated against the format and completed with its defaults. Needs no torch.

`resolve` also validates configurations, long before there is a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from quantexp.formats.table import get_format
from quantexp.formats.types import Format, Rounding, ScaleRule, Scaling

_Choice = TypeVar("_Choice", bound=Enum)


@dataclass(frozen=True)
class Options:
    """A format and its complete quantisation options."""

    fmt: Format
    #: Elements along the axis that share a scale; 1 if the format has no blocks.
    block: int
    #: FLOOR, without effect, if the format has no block scale.
    scale_rule: ScaleRule
    rounding: Rounding
    #: Whether values beyond the largest finite one become that value, rather than infinite (or NaN, without infinity).
    saturate: bool
    scaling: Scaling
    #: The amax after scaling; 1, without effect, if the tensor has no scale.
    amax_target: float
    #: Seed and offset of random numbers, both in [0, 2^64); without effect unless rounding is stochastic.
    seed: int
    offset: int
    #: Whether elements are multiplied by 3/4 after the scale is chosen and before they are rounded.
    pre_scale: bool


def resolve(
    fmt: str | Format,
    *,
    block: int | None = None,
    scale_rule: ScaleRule | str | None = None,
    rounding: Rounding | str | None = None,
    saturate: bool = True,
    scaling: Scaling | str | None = None,
    amax_target: float | None = None,
    has_amax: bool = False,
    seed: int | None = None,
    offset: int | None = None,
    pre_scale: bool = False,
) -> Options:
    """The complete options; None selects the format's default.

    `has_amax` states whether the caller passes an amax that was reduced elsewhere.

    Raises:
        ValueError: an unknown format or value, or an option that the format does not have.
    """
    fmt = get_format(fmt)
    requested = None if scaling is None else _choice("scaling", scaling, Scaling)
    scaling = requested or fmt.scaling
    is_set = {
        "block": block is not None,
        "scale_rule": scale_rule is not None,
        "rounding": rounding is not None,
        "saturate": saturate is not True,
        "scaling": requested not in (None, Scaling.NONE),
        "amax_target": amax_target is not None,
        "amax": has_amax,
        "seed": seed is not None,
        "offset": offset is not None,
        "pre_scale": pre_scale is not False,
    }
    _refuse_foreign(fmt, is_set)
    rounding = _choice("rounding", rounding or fmt.rounding, Rounding)
    _check_draw(rounding, seed, offset)
    if scaling is Scaling.NONE:
        for name in ("amax_target", "amax"):
            if is_set[name]:
                raise ValueError(
                    f"{name} has no meaning with scaling 'none': leave it out, or scale"
                )
    if scaling is Scaling.DELAYED and not has_amax:
        raise ValueError(
            "scaling 'delayed' needs amax, the largest of the steps before (AmaxHistory.amax_for)"
        )
    return Options(
        fmt=fmt,
        block=_checked_block(block) if block is not None else fmt.block or 1,
        scale_rule=_choice("scale_rule", scale_rule or fmt.scale_rule or "floor", ScaleRule),
        rounding=rounding,
        saturate=saturate,
        scaling=scaling,
        amax_target=_checked_target(fmt.amax_target or 1.0 if amax_target is None else amax_target),
        seed=seed or 0,
        offset=offset or 0,
        pre_scale=pre_scale,
    )


def _refuse_foreign(fmt: Format, is_set: dict[str, bool]) -> None:
    for name, is_option_set in is_set.items():
        if is_option_set and name not in fmt.options:
            has = ", ".join(sorted(fmt.options)) or "no options"
            raise ValueError(f"{fmt.name} has no option {name}: it has {has}")


def _check_draw(rounding: Rounding, seed: int | None, offset: int | None) -> None:
    if rounding is Rounding.STOCHASTIC and seed is None:
        raise ValueError("rounding 'stochastic' needs a seed, an integer in [0, 2^64), got None")
    for name, value in (("seed", seed), ("offset", offset)):
        if value is None:
            continue
        if rounding is not Rounding.STOCHASTIC:
            raise ValueError(
                f"{name} has no meaning with rounding {rounding.value!r}: leave it out, or round stochastically"
            )
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
            raise ValueError(f"{name} must be an integer in [0, 2^64), got {value!r}")


def _choice(name: str, value: _Choice | str, choices: type[_Choice]) -> _Choice:
    try:
        return choices(value)
    except ValueError:
        allowed = ", ".join(choice.value for choice in choices)
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}") from None


def _checked_block(block: int) -> int:
    if not isinstance(block, int) or isinstance(block, bool) or block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two of at least 1, got {block!r}")
    return block


def _checked_target(target: float) -> float:
    if not (math.isfinite(target) and target > 0):
        raise ValueError(f"amax_target must be finite and above 0, got {target!r}")
    return float(target)
