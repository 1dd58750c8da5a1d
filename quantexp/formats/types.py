"""The values that describe a number format, without arithmetic and without torch.

An `Element` is the code of a single value; a `Format` is an element and how blocks of elements share a scale. The
sibling modules contain the operations, one per file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ScaleRule(StrEnum):
    """How a block's amax determines its scale 2^s; emax and max are the element's."""

    #: s = floor(log2 amax) - emax, OCP MX v1.0 section 6.3; values up to 2^(emax+1) saturate.
    FLOOR = "floor"
    #: s = ceil(log2(amax / max)), as for Blackwell's tensor cores; nothing saturates.
    RCEIL = "rceil"
    #: s = ceil(log2 amax) - emax; nothing saturates.
    CEIL = "ceil"
    #: amax rounded half up to the element's mantissa bits, then as FLOOR.
    EVEN = "even"


class Rounding(StrEnum):
    """How to round a value between two values of the grid."""

    #: To the nearest; a tie goes to the neighbour that is an even multiple of the local spacing.
    EVEN = "even"
    #: To the nearest; a tie goes to the neighbour of larger magnitude.
    AWAY = "away"
    #: Away from zero with the probability that preserves the mean, else towards zero.
    STOCHASTIC = "stochastic"


class Scaling(StrEnum):
    """The scale of a whole tensor, for a format that has one."""

    #: No scale.
    NONE = "none"
    #: The power of two that brings amax closest below the target: exact in every dtype.
    CURRENT = "current"
    #: target / amax (or its reciprocal, depending on the format), rounded to float32.
    EXACT = "exact"
    #: As CURRENT, with an amax that the caller passes: that of previous steps (see `history`).
    DELAYED = "delayed"


class Hadamard(StrEnum):
    """The transform of a product's operands before rounding, in blocks along the axis that it reduces."""

    #: No transform.
    NONE = "none"
    #: The Walsh-Hadamard transform.
    DETERMINISTIC = "deterministic"
    #: The Walsh-Hadamard transform after random sign changes, the same in every block.
    RANDOM = "random"


class Axis(StrEnum):
    """An axis that a matrix product of training reduces over; blocks run along it."""

    INPUT_WIDTH = "input_width"
    OUTPUT_WIDTH = "output_width"
    TOKENS = "tokens"
    HEAD_DIM = "head_dim"
    KEYS = "keys"
    QUERIES = "queries"


class Family(StrEnum):
    """The arithmetic of a format."""

    #: Blocks along one axis, each with a power-of-two scale (OCP MX v1.0).
    MX = "mx"
    #: Blocks along one axis, each with an 8-bit float scale, and one scale per tensor (NVFP4).
    NV = "nv"
    #: A small float under one scale per tensor (OCP OFP8).
    FP8 = "fp8"
    #: Tapered precision under at most one scale per tensor (HiFloat8, arXiv 2409.16626).
    HIF8 = "hif8"
    #: A plain 16-bit float.
    BF16 = "bf16"


@dataclass(frozen=True)
class Element:
    """A signed binary float code, in the terms of OCP MX v1.0 section 5.3."""

    name: str
    #: Storage bits of one code, sign included.
    bits: int
    #: Exponent of the smallest normal value; for hif8, of the smallest value.
    emin: int
    #: Exponent of the largest finite value.
    emax: int
    #: Stored mantissa bits; for hif8 the largest number that any value has.
    mantissa_bits: int
    #: Largest finite value.
    max: float
    #: Magnitude codes (sign bit cleared) of infinity.
    inf_codes: tuple[int, ...] = ()
    #: Magnitude codes (sign bit cleared) of NaN.
    nan_codes: tuple[int, ...] = ()

    @property
    def sign_bit(self) -> int:
        """The sign bit, as a mask over the code."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True)
class Format:
    """A number format for quantising tensors."""

    #: Canonical name, as it appears in configurations and file names.
    name: str
    family: Family
    element: Element
    #: Elements that share a scale along the axis; None without blocks.
    block: int | None
    #: None if a block has no power-of-two scale.
    scale_rule: ScaleRule | None
    #: Default of the format's specification; schemes set theirs explicitly.
    rounding: Rounding
    #: Keyword options of `quantise` that apply to this format.
    options: frozenset[str]
    #: Default scaling of the whole tensor.
    scaling: Scaling = Scaling.NONE
    #: Default amax after scaling.
    amax_target: float | None = None
    #: The element of block scales; None if they are E8M0, or there are none.
    block_scale: Element | None = None
    #: Other names for `get_format`.
    aliases: tuple[str, ...] = ()
    #: The document that defines the format.
    source: str = ""
