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
    #: To the neighbour of smaller magnitude: what lies beyond is cut off.
    ZERO = "zero"
    #: Away from zero with the probability that preserves the mean, else towards zero.
    STOCHASTIC = "stochastic"

    @property
    def is_to_nearest(self) -> bool:
        """Whether only a tie depends on it."""
        return self in (Rounding.EVEN, Rounding.AWAY)


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


class Of(StrEnum):
    """What a product quantises of an operand; or a format to which its tensor is rounded before."""

    #: The tensor in high precision.
    HIGH = "high"
    #: Backward products: the values that the forward product multiplied.
    FORWARD = "forward"


class Delta(StrEnum):
    """What the derivative of attention's softmax, dS = P (dP - delta), subtracts in each row."""

    #: The sum over keys of P dP.
    P = "P"
    #: The sum over the head's width of dO o, as flash attention has it; equal in exact arithmetic.
    O = "o"  # noqa: E741


@dataclass(frozen=True)
class Softmax:
    """How attention's softmax enters the product with v, and its own derivative."""

    #: Whether the operand is exp(S - m), and the product is divided by the row's sum.
    unnormalised: bool = False
    #: If several scores of a row have its maximum, m is so many times that, or 0 where it is negative.
    max_factor: float | None = None
    delta: Delta = Delta.P

    def __str__(self) -> str:
        return f"unnormalised {self.unnormalised}, max_factor {self.max_factor}, delta {self.delta}"

    @property
    def is_stock(self) -> bool:
        """Whether it is Megatron's."""
        return self == STOCK


#: Megatron's: P is divided before it is an operand.
STOCK = Softmax()


class Take(StrEnum):
    """What a part takes out of an operand."""

    #: The mean over an axis, at every place of it.
    MEAN = "mean"
    #: The channels of the largest norm over an axis.
    CHANNELS = "channels"
    #: The elements of the largest magnitude.
    ELEMENTS = "elements"
    #: The projection onto a subspace that has most of the operand.
    LOW_RANK = "low_rank"


class Axis(StrEnum):
    """An axis that blocks run along: the one that a matrix product of training reduces over, or a norm's width."""

    INPUT_WIDTH = "input_width"
    OUTPUT_WIDTH = "output_width"
    TOKENS = "tokens"
    HEAD_DIM = "head_dim"
    KEYS = "keys"
    QUERIES = "queries"
    WIDTH = "width"


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
    #: Any element and block under any scale: a declared format that is none of the others (see `declared`).
    GRID = "grid"
    #: A Python class of the user (see `declared.python`).
    PYTHON = "python"
    #: A plain 16-bit float.
    BF16 = "bf16"


class BlockScaleKind(StrEnum):
    """The numbers that the block scales of a declared format are."""

    #: Powers of two from 2^-127 to 2^127.
    E8M0 = "e8m0"
    #: The positive values of a small float, under a scale of the tensor or not.
    FLOAT = "float"
    BF16 = "bf16"
    FP32 = "fp32"


class BlockRule(StrEnum):
    """How a block's amax determines its scale in a declared format; max is the element's.

    `floor`, `rceil`, `ceil` and `even` are those of `ScaleRule` for powers of two. For other scales `floor` and `ceil`
    take the neighbours of amax / max in the scale's grid.
    """

    FLOOR = "floor"
    RCEIL = "rceil"
    CEIL = "ceil"
    EVEN = "even"
    #: The scale nearest to amax / max, ties to even.
    EXACT = "exact"
    #: Of some scales up to that of the amax, the one with the least error in the block.
    SEARCH = "search"


@dataclass(frozen=True)
class Element:
    """A signed code, in the terms of OCP MX v1.0 section 5.3: a binary float, or a list of values.

    An integer of n + 1 bits is a float whose values are all subnormal: n mantissa bits and emin = n, for a step of 1.
    """

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
    #: The most negative value; None if it is -max.
    lowest: float | None = None
    #: Whether zero has a sign.
    has_negative_zero: bool = True
    #: All values in ascending order, of an element that is a list of them; else empty.
    values: tuple[float, ...] = ()

    @property
    def sign_bit(self) -> int:
        """The sign bit, as a mask over the code."""
        return 1 << (self.bits - 1)


#: The block of a format with one scale for each row: longer than any axis.
WHOLE_ROW = 1 << 40


class Choose(StrEnum):
    """The error of a block by which one of several scales is chosen: x - y over its elements."""

    #: The sum of squares.
    MSE = "mse"
    #: The sum of magnitudes.
    MAE = "mae"
    #: The largest magnitude.
    MAX = "max"


@dataclass(frozen=True)
class BlockScale:
    """The block scales of a declared format."""

    kind: BlockScaleKind
    rule: BlockRule
    #: The float of the kind `float`; None for the others.
    element: Element | None = None
    #: What a block's amax may be brought to, each by the rule; empty for the element's largest value alone.
    candidates: tuple[float, ...] = ()
    choose: Choose = Choose.MSE
    #: Elements that a block may take in place of the format's, each under scales for its own largest value.
    others: tuple[Element, ...] = ()
    #: Elements of groups within a block, each in the one before, which have one bit of exponent each.
    micro_exponents: tuple[int, ...] = ()
    #: Elements of a block, if the format's block is several of them: a macro block, or those that share a correction.
    each: int | None = None
    #: Elements whose blocks' scales share a correction.
    corrected: int | None = None
    #: The scale of a macro block, in place of that of the tensor, and what it brings the macro block's amax to.
    macro: Scaling = Scaling.NONE
    macro_target: float = 1.0

    @property
    def is_chosen(self) -> bool:
        """Whether a scale follows from all elements of its block, not from the amax alone."""
        return bool(self.candidates or self.others) or self.rule is BlockRule.SEARCH

    @property
    def is_of_amax(self) -> bool:
        """Whether a block has one scale, which follows from its amax."""
        return not (self.is_chosen or self.micro_exponents or self.each)

    @property
    def bits(self) -> int:
        """Storage bits of one scale, and of the choice among elements, which has the sign's bit if it fits."""
        match self.kind:
            case BlockScaleKind.E8M0:
                own = 8
            case BlockScaleKind.FLOAT:
                assert self.element is not None
                own = self.element.bits - 1
            case BlockScaleKind.BF16:
                own = 15
            case BlockScaleKind.FP32:
                own = 31
        own += len(self.others).bit_length()
        return next(bits for bits in (8, 16, 32, 64) if own <= bits)


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
    #: Elements of a block across the axis: rows of a matrix whose blocks run along the other one.
    across: int = 1
    #: The block scales of the family `grid`; None without blocks.
    grid_scale: BlockScale | None = None
    #: The definition of a declared format, as JSON; empty for a format of the table.
    definition: str = ""

    def bits_each(self, block: int | None = None) -> float:
        """Storage bits of an element with its share of the scale of its block; `block` replaces the format's own."""
        block = self.block if block is None else block
        if self.block is None or block is None:
            return float(self.element.bits)
        if self.grid_scale is None:
            return self.element.bits + 8 / (block * self.across)
        scale = self.grid_scale
        levels = sum(1 / size for size in scale.micro_exponents)
        if scale.macro is not Scaling.NONE:
            levels += (32 if scale.macro is Scaling.EXACT else 8) / block
        return self.element.bits + levels + scale.bits / ((scale.each or block) * self.across)

    @property
    def depends_on_axis(self) -> bool:
        """Whether the axis of the blocks changes the values; square blocks lie alike along both."""
        if self.family is Family.PYTHON:
            return True
        return self.block is not None and self.block != self.across

    @property
    def label(self) -> str:
        """The name in names of schemes and files: of a Python class, without its module."""
        return self.name.rpartition(":")[2]
