"""How a tensor is quantised: a number format and all its options. Needs no torch.

`resolve` validates options against the format and completes them with its defaults. It also validates configurations,
long before there is a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TypeVar

from quantexp.formats.table import BY_ANY_NAME
from quantexp.formats.types import (
    STOCK,
    Axis,
    Family,
    Format,
    Hadamard,
    Rounding,
    ScaleRule,
    Scaling,
    Softmax,
    Take,
)

_Choice = TypeVar("_Choice", bound=Enum)
_Function = TypeVar("_Function", bound=Callable[..., object])

#: In place of the format of a part that is not multiplied.
LEFT_OUT = "none"


@dataclass(frozen=True)
class Part:
    """What is taken out of an operand, rounded by itself and multiplied apart (`quantexp.quant.parts`)."""

    take: Take
    #: How it is rounded; None leaves it out of the product.
    spec: QuantSpec | None
    #: The axis of the mean, or of each channel's norm.
    along: Axis | None = None
    #: How many channels, elements or dimensions of the subspace, or which share of all; None for a mean.
    number: int | None = None
    share: float | None = None
    #: Whether it is taken of the error that is left once the operand is rounded.
    from_error: bool = False


@dataclass(frozen=True)
class QuantSpec:
    """What happens to one operand before it is multiplied.

    An option that the format does not have keeps its default, which has no effect. Of the fields, the operations of
    `quantexp.formats` use those up to `pre_scale`; the others are for `quantexp.quant`.
    """

    fmt: Format
    #: Elements along the axis that share a scale, or a correction of their scales; 1 if the format has no blocks.
    block: int = 1
    scale_rule: ScaleRule = ScaleRule.FLOOR
    rounding: Rounding = Rounding.EVEN
    #: Whether values beyond the largest finite one become that value, rather than infinite (or NaN, without infinity).
    saturate: bool = True
    scaling: Scaling = Scaling.NONE
    #: The amax after scaling.
    amax_target: float = 1.0
    #: What elements are multiplied by between the choice of the scale and rounding; the product compensates.
    pre_scale: float = 1.0
    #: The transform before quantisation, and its block.
    hadamard: Hadamard = Hadamard.NONE
    hadamard_block: int = 1
    #: The axis that blocks and transforms run along, if the operand belongs to a product.
    axis: Axis | None = None
    #: The forward copy, straight through: quantised once, along the forward product's axis.
    reuse: bool = False
    #: What is quantised again: the forward copy (`reuse`), or one stored along rows; None means high precision.
    of: QuantSpec | None = None
    #: Delayed scaling: iterations in the amax history.
    window: int | None = None
    #: Forward product: whether the gradient is zero where the operand saturated.
    clip_gradient: bool = False
    #: Forward product: the power of the gradient estimator (see `estimator`); None for straight through.
    dge: float | None = None
    #: What is taken out of the operand, in order; the format rounds what remains.
    parts: tuple[Part, ...] = ()
    #: Attention's P in the forward product: what of the softmax it is.
    softmax: Softmax = STOCK
    #: Whether this is the left operand of its product.
    left: bool = field(default=True, compare=False)
    #: Whether this is a layer's weight, which every micro-batch of a step multiplies.
    weight: bool = field(default=False, compare=False)
    #: Key of its random numbers and its amax history: the slot's label; for `reuse` the forward slot's.
    stream: str = field(default="", compare=False)

    @property
    def quantised(self) -> bool:
        """Whether the operand is quantised; bf16 marks a slot in the working precision."""
        return self.fmt.family is not Family.BF16

    @property
    def is_pre_scaled(self) -> bool:
        """Whether a part of the operand is rounded in place of the whole."""
        return self.pre_scale != 1.0

    @property
    def has_blocks(self) -> bool:
        """Whether its values depend on the axis, through blocks or a transform, or lie along it in parts."""
        return self.depends_on_axis or self.is_transformed or bool(self.parts)

    @property
    def scale_block(self) -> int:
        """Elements along the axis that share a scale: less than `block` if scales share a correction."""
        return (self.fmt.grid_scale and self.fmt.grid_scale.each) or self.block

    @property
    def depends_on_axis(self) -> bool:
        """Whether the axis of the blocks changes the values: as of the format, unless its block is replaced."""
        is_along = self.fmt.block is not None and self.block != self.fmt.across
        return is_along or self.fmt.depends_on_axis

    @property
    def num_pieces(self) -> int:
        """What is multiplied: the parts and what remains of the operand."""
        return 1 + sum(part.spec is not None for part in self.parts)

    @property
    def is_scaled(self) -> bool:
        """Whether the tensor has a scale of its own."""
        return self.scaling is not Scaling.NONE

    @property
    def is_transformed(self) -> bool:
        """Whether a Hadamard transform precedes the quantisation."""
        return self.hadamard is not Hadamard.NONE

    @property
    def draws(self) -> bool:
        """Whether its values may depend on random numbers."""
        return self.rounding is Rounding.STOCHASTIC or self.fmt.family is Family.PYTHON

    @cached_property
    def needs_step_state(self) -> bool:
        """Whether it needs random numbers, an amax history or a transform."""
        return self.draws or self.scaling is Scaling.DELAYED or self.is_transformed

    @property
    def copy(self) -> QuantSpec | None:
        """The forward copy that a backward product multiplies, or quantises again; None without one."""
        return self if self.reuse else None if self.is_of_stored else self.of

    @property
    def is_of_stored(self) -> bool:
        """Whether it quantises a stored copy of its tensor."""
        return self.of is not None and not self.of.reuse

    @property
    def chain(self) -> tuple[QuantSpec, ...]:
        """Its quantisations in their order: those of the copy that is quantised again, and its own."""
        return (self,) if self.of is None else (*self.of.chain, self)

    @property
    def once_per_step(self) -> bool:
        """Whether every micro-batch of a step may multiply one copy of it; each has random signs of its own."""
        return self.weight and self.hadamard is not Hadamard.RANDOM

    @cached_property
    def along_any_axis(self) -> QuantSpec:
        """Equal for two operands if their copies of one tensor differ at most in the axis of the blocks."""
        return replace(self, axis=None, reuse=False, clip_gradient=False, dge=None)


#: A specification, or a format with its own options.
AnySpec = str | Format | QuantSpec


def get_format(name: str | Format, declared: Mapping[str, Format] | None = None) -> Format:
    """The format with that name or alias; a `Format` is returned unchanged.

    Args:
        name: of the table, of `declared`, or of a shipped file; or package.module:Class.
        declared: formats of a configuration, by name; they take precedence over shipped files.

    Raises:
        ValueError: no format has that name.
    """
    if isinstance(name, Format):
        return name
    if name in BY_ANY_NAME:
        return BY_ANY_NAME[name]
    from quantexp.formats.definitions.files import declared_by_name

    return declared_by_name(name, declared or {})


def constant_for_dynamo(function: _Function) -> _Function:
    """Let torch.compile call the function instead of tracing it, as torch.compiler.assume_constant_result does.

    That function would import torch's compiler. Its arguments must be constants; a changed one compiles anew.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_for_dynamo
def resolve(
    fmt: AnySpec,
    *,
    block: int | None = None,
    scale_rule: ScaleRule | str | None = None,
    rounding: Rounding | str | None = None,
    saturate: bool = True,
    scaling: Scaling | str | None = None,
    amax_target: float | None = None,
    pre_scale: bool | float = False,
) -> QuantSpec:
    """The complete specification; None selects the format's default. A `QuantSpec` is returned unchanged.

    Raises:
        ValueError: an unknown format or value, or an option that the format does not have, or that is set beside a
            `QuantSpec`.
    """
    is_set = {
        "block": block is not None,
        "scale_rule": scale_rule is not None,
        "rounding": rounding is not None,
        "saturate": saturate is not True,
        "scaling": scaling not in (None, Scaling.NONE),
        "amax_target": amax_target is not None,
        "pre_scale": pre_scale is not False,
    }
    if isinstance(fmt, QuantSpec):
        is_set["scaling"] = scaling is not None
        if names := ", ".join(name for name in is_set if is_set[name]):
            raise ValueError(
                f"a QuantSpec has all its options: leave out {names}, or change them in it"
            )
        return fmt
    fmt = get_format(fmt)
    scaling = fmt.scaling if scaling is None else _choice("scaling", scaling, Scaling)
    for name, is_option_set in is_set.items():
        if is_option_set:
            _refuse_foreign(fmt, name)
    if scaling is Scaling.NONE and amax_target is not None:
        raise _unscaled("amax_target")
    rounding = _choice("rounding", rounding or fmt.rounding, Rounding)
    if rounding is Rounding.ZERO and not saturate:
        raise ValueError("saturate=false has no meaning with rounding 'zero': nothing overflows")
    return QuantSpec(
        fmt=fmt,
        block=_checked_block(block, fmt) if block is not None else fmt.block or 1,
        scale_rule=_choice("scale_rule", scale_rule or fmt.scale_rule or "floor", ScaleRule),
        rounding=rounding,
        saturate=saturate,
        scaling=scaling,
        amax_target=_checked_target(fmt.amax_target or 1.0 if amax_target is None else amax_target),
        pre_scale=_checked_factor(pre_scale),
    )


def check_amax(spec: QuantSpec, is_passed: bool) -> None:
    """Refuse an amax that was reduced elsewhere where it has no effect, and its absence where it is needed.

    Raises:
        ValueError: either.
    """
    if is_passed:
        _refuse_foreign(spec.fmt, "amax")
        if not spec.is_scaled:
            raise _unscaled("amax")
    elif spec.scaling is Scaling.DELAYED:
        raise ValueError(
            "scaling 'delayed' needs amax, the largest of the steps before (AmaxHistory.amax_for)"
        )


def check_draw(spec: QuantSpec, seed: int | None, offset: int | None) -> None:
    """Refuse a seed and an offset of random numbers where they have no effect, and a missing seed.

    Raises:
        ValueError: either, or a value outside [0, 2^64).
    """
    if spec.rounding is Rounding.STOCHASTIC and seed is None:
        raise ValueError("rounding 'stochastic' needs a seed, an integer in [0, 2^64), got None")
    for name, value in (("seed", seed), ("offset", offset)):
        if value is None:
            continue
        _refuse_foreign(spec.fmt, name)
        if not spec.draws:
            raise ValueError(
                f"{name} has no meaning with rounding {spec.rounding.value!r}: leave it out, or round stochastically"
            )
        check_number(name, value)


def check_number(name: str, value: int) -> None:
    """Raise a ValueError unless a seed or an offset is an integer in [0, 2^64)."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ValueError(f"{name} must be an integer in [0, 2^64), got {value!r}")


def _refuse_foreign(fmt: Format, name: str) -> None:
    if name not in fmt.options:
        has = ", ".join(sorted(fmt.options)) or "no options"
        raise ValueError(f"{fmt.name} has no option {name}: it has {has}")


def _unscaled(name: str) -> ValueError:
    return ValueError(f"{name} has no meaning with scaling 'none': leave it out, or scale")


def _choice(name: str, value: _Choice | str, choices: type[_Choice]) -> _Choice:
    try:
        return choices(value)
    except ValueError:
        allowed = ", ".join(choice.value for choice in choices)
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}") from None


def _checked_block(block: int, fmt: Format) -> int:
    if block == fmt.block:
        return block
    if not isinstance(block, int) or isinstance(block, bool) or block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two of at least 1, got {block!r}")
    return block


#: The factor of `pre_scale=True` (arXiv 2502.20586).
PRE_SCALE = 0.75


def _checked_factor(pre_scale: bool | float) -> float:
    """The factor of `pre_scale`; less than 3/4 leaves the top of the grid unused."""
    if isinstance(pre_scale, bool):
        return PRE_SCALE if pre_scale else 1.0
    if not (isinstance(pre_scale, float) and PRE_SCALE <= pre_scale < 1):
        raise ValueError(
            f"pre_scale must be true, false or a number of at least 0.75 and below 1, got {pre_scale!r}"
        )
    return pre_scale


def _checked_target(target: float) -> float:
    if not (math.isfinite(target) and target > 0):
        raise ValueError(f"amax_target must be finite and above 0, got {target!r}")
    return float(target)
