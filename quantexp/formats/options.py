"""The options of one quantisation, checked against the format and completed. Needs no torch.

Configurations can be checked with `resolve` long before there is a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from quantexp.formats.table import HIF8_AMAX_TARGET, get_format
from quantexp.formats.types import Format, Rounding, ScaleRule, Scaling

_Choice = TypeVar("_Choice", bound=Enum)


@dataclass(frozen=True)
class Options:
    """A format and how to quantise to it, nothing left open."""

    fmt: Format
    #: elements along the axis that share a scale; 1 where the format has no blocks.
    block: int
    #: FLOOR, and without effect, where the format has no block scale.
    scale_rule: ScaleRule
    rounding: Rounding
    #: HiF8: values beyond the largest finite one become it, rather than infinite.
    saturate: bool
    scaling: Scaling
    #: HiF8: where `scaling` brings amax to.
    amax_target: float


def resolve(
    fmt: str | Format,
    *,
    block: int | None = None,
    scale_rule: ScaleRule | str | None = None,
    rounding: Rounding | str | None = None,
    saturate: bool = True,
    scaling: Scaling | str = Scaling.NONE,
    amax_target: float | None = None,
    has_amax: bool = False,
) -> Options:
    """The complete options: what is None is the format's own.

    `has_amax` says whether an amax that was reduced elsewhere will be given.

    Raises:
        ValueError: for an unknown format or value, and for an option that the format does not have.
    """
    fmt = get_format(fmt)
    scaling = _choice("scaling", scaling, Scaling)
    given = {
        "block": block is not None,
        "scale_rule": scale_rule is not None,
        "rounding": rounding is not None,
        "saturate": saturate is not True,
        "scaling": scaling is not Scaling.NONE,
        "amax_target": amax_target is not None,
        "amax": has_amax,
    }
    _refuse_foreign(fmt, given)
    if scaling is Scaling.NONE:
        for name in ("amax_target", "amax"):
            if given[name]:
                raise ValueError(
                    f"{name} has no meaning with scaling 'none': leave it out, or scale"
                )
    return Options(
        fmt=fmt,
        block=_checked_block(block) if block is not None else fmt.block or 1,
        scale_rule=_choice("scale_rule", scale_rule or fmt.scale_rule or "floor", ScaleRule),
        rounding=_choice("rounding", rounding or fmt.rounding, Rounding),
        saturate=saturate,
        scaling=scaling,
        amax_target=_checked_target(HIF8_AMAX_TARGET if amax_target is None else amax_target),
    )


def _refuse_foreign(fmt: Format, given: dict[str, bool]) -> None:
    for name, is_given in given.items():
        if is_given and name not in fmt.options:
            has = ", ".join(sorted(fmt.options)) or "no options"
            raise ValueError(f"{fmt.name} has no option {name}: it has {has}")


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
