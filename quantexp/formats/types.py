"""The values that describe a number format, without any arithmetic and without torch.

An `Element` is the code a single value is stored in, a `Format` an element together with how
blocks of elements share a scale. What is done with them lives in the sibling modules, one verb a
file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ScaleRule(StrEnum):
    """How a block's scale 2^s follows from its amax; emax and max are the element's."""

    #: s = floor(log2 amax) - emax, OCP MX v1.0 section 6.3; values up to 2^(emax+1) saturate.
    FLOOR = "floor"
    #: s = ceil(log2(amax / max)), what Blackwell's tensor cores are fed; nothing saturates.
    RCEIL = "rceil"
    #: s = ceil(log2 amax) - emax; nothing saturates.
    CEIL = "ceil"
    #: amax rounded half up to the element's mantissa bits, then as FLOOR.
    EVEN = "even"


class Rounding(StrEnum):
    """Where a value between two values of the grid goes."""

    #: to the nearest; halfway, to the neighbour that is an even multiple of the local spacing.
    EVEN = "even"
    #: to the nearest; halfway, to the neighbour of larger magnitude.
    AWAY = "away"
    #: away from zero with the probability that leaves the mean where it is, else towards zero.
    STOCHASTIC = "stochastic"


class Scaling(StrEnum):
    """The one scale of a whole tensor, of a format that has one."""

    #: no scale.
    NONE = "none"
    #: the power of two that brings amax closest below the target: exact in every dtype.
    CURRENT = "current"
    #: target / amax (or its reciprocal, see the format), rounded to float32.
    EXACT = "exact"
    #: as CURRENT, of an amax that is handed over: that of the steps before (see `history`).
    DELAYED = "delayed"


class Hadamard(StrEnum):
    """Which transform a product's operands go through, in blocks along the axis it reduces, before rounding."""

    #: none.
    NONE = "none"
    #: the Walsh-Hadamard transform.
    DETERMINISTIC = "deterministic"
    #: the same of a tensor whose signs were changed at random beforehand, alike in every block.
    RANDOM = "random"


class Family(StrEnum):
    """Which arithmetic a format follows."""

    #: blocks along one axis, each with a power-of-two scale (OCP MX v1.0).
    MX = "mx"
    #: blocks along one axis, each with an 8-bit float scale, and one scale of the tensor (NVFP4).
    NV = "nv"
    #: a small float under one scale of the tensor (OCP OFP8).
    FP8 = "fp8"
    #: tapered precision under one scale of the tensor, if any (HiFloat8, arXiv 2409.16626).
    HIF8 = "hif8"
    #: a plain 16-bit float.
    BF16 = "bf16"


@dataclass(frozen=True)
class Element:
    """A signed binary float code, by the words of OCP MX v1.0 section 5.3."""

    name: str
    #: storage bits of one code, sign included.
    bits: int
    #: exponent of the smallest normal value; for hif8, of the smallest value.
    emin: int
    #: exponent of the largest finite value.
    emax: int
    #: stored mantissa bits; for hif8 the most that any value has.
    mantissa_bits: int
    #: largest finite value.
    max: float
    #: magnitude codes (sign bit cleared) that stand for infinity.
    inf_codes: tuple[int, ...] = ()
    #: magnitude codes (sign bit cleared) that stand for NaN.
    nan_codes: tuple[int, ...] = ()

    @property
    def sign_bit(self) -> int:
        """The bit that holds the sign, as a mask over the code."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True)
class Format:
    """A number format that a tensor can be quantised to."""

    #: canonical name, as it appears in configurations and file names.
    name: str
    family: Family
    element: Element
    #: elements that share a scale along the axis; None where there are no blocks.
    block: int | None
    #: None where no power-of-two scale follows from a block's amax.
    scale_rule: ScaleRule | None
    #: what the format's specification says; schemes set theirs explicitly.
    rounding: Rounding
    #: names of the keyword options of `quantise` that mean something for this format.
    options: frozenset[str]
    #: the scale of the whole tensor, unless the caller says otherwise.
    scaling: Scaling = Scaling.NONE
    #: what the scale of the tensor brings amax to, unless the caller says otherwise.
    amax_target: float | None = None
    #: the code a block's scale is stored in; None where that is E8M0, or there is none.
    block_scale: Element | None = None
    #: other names under which `get_format` finds it.
    aliases: tuple[str, ...] = ()
    #: where the format is defined.
    source: str = ""
