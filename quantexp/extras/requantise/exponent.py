"""The fidelity as a function of the scale: quantises an operand with scales shifted by powers of two.

    MX              the exponent of every block's scale is floor(log2 amax) - emax + d, for d in OFFSETS: d = 0 is
                    the floor rule, d = 1 what rceil and ceil do where they differ from it
    tensor scales   the power of two that brings the tensor's amax to at most 2^t, for several t up to and beyond
                    the format's largest value

Everything is rounded to nearest, ties as the format has it, without a transform. Scale exponents stay in E8M0's range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantexp.analysis.tensors.sample import OperandSample
from quantexp.capture.statistics.errors import Fidelity, fidelity, quantisation_error
from quantexp.formats import Family, Format, ScaleRule, Scaling, resolve
from quantexp.formats.families import block_amax_bits
from quantexp.formats.rounding import (
    EXPONENT_MASK,
    MANTISSA_BITS,
    inverse_power_of_two,
    power_of_two,
    round_element,
    scale_field,
)

#: Offsets of a block's exponent from the floor rule's.
OFFSETS = range(-4, 7)
#: Offsets of the amax target's exponent from that of the format's largest value.
_TARGETS = range(-14, 4)
_LARGEST_FIELD = 254 << MANTISSA_BITS


@dataclass(frozen=True)
class Point:
    """One scale of one format: d of MX, t of a tensor scale."""

    format: Format
    exponent: int

    @property
    def is_offset(self) -> bool:
        """Whether the exponent is a block's offset rather than a target of the tensor's amax."""
        return self.format.family is Family.MX


def study_points(formats: list[Format]) -> list[Point]:
    """All points of these formats."""
    points = []
    for fmt in formats:
        if fmt.family in (Family.GRID, Family.PYTHON):
            continue  # its scales are no powers of two that one could move
        reach: range = OFFSETS
        if fmt.family is not Family.MX:
            top = math.floor(math.log2(_largest(fmt)))
            reach = range(top + _TARGETS.start, top + _TARGETS.stop)
        points += [Point(fmt, exponent) for exponent in reach]
    return points


def study(sample: OperandSample, points: list[Point]) -> Iterator[Fidelity]:
    """The fidelity at each point."""
    for point in points:
        if point.is_offset:
            yield _at_offset(sample, point.format, point.exponent)
        else:
            yield _at_target(sample, point.format, point.exponent)


def _largest(fmt: Format) -> float:
    """The largest amax without saturation: for NVFP4, 6 times the largest block scale."""
    top = fmt.element.max
    return top if fmt.block_scale is None else top * fmt.block_scale.max


def _at_target(sample: OperandSample, fmt: Format, exponent: int) -> Fidelity:
    """Scale NVFP4's amax down instead, exactly in float64, because its target is fixed."""
    target, amax = 2.0**exponent, sample.amax
    if fmt.family is Family.NV:
        assert fmt.amax_target is not None
        assert amax is not None
        amax = amax.double() * fmt.amax_target / target
        spec = resolve(fmt, scaling=Scaling.CURRENT)
    else:
        spec = resolve(fmt, scaling=Scaling.CURRENT, amax_target=target)
    return quantisation_error(sample.x, spec, sample.dim, amax=amax, padding=sample.padding)


def _at_offset(sample: OperandSample, fmt: Format, offset: int) -> Fidelity:
    x = sample.x.movedim(sample.dim, -1)
    q, limit = quantise_at_offset(x, fmt, offset)
    padding = None if sample.padding is None else sample.padding.movedim(sample.dim, -1)
    return fidelity(x, q, x.abs() > limit, padding)


def quantise_at_offset(x: Tensor, fmt: Format, offset: int) -> tuple[Tensor, Tensor]:
    """X under MX scales 2^d times those of the floor rule, blocks along the last axis; and each element's limit.

    The values are float32; a block with NaN or Inf is NaN. The last block may be short.
    """
    assert fmt.block is not None
    extent, element = x.shape[-1], fmt.element
    padded = pad(x.float(), (0, -extent % fmt.block))
    x_OBKI = padded.reshape(1, -1, fmt.block, 1)
    q, magic = torch.empty_like(x_OBKI), torch.empty_like(x_OBKI)
    floor = scale_field(block_amax_bits(x_OBKI, q), element, ScaleRule.FLOOR)
    step = offset << MANTISSA_BITS
    moved = floor.clamp(max(0, -step), _LARGEST_FIELD - max(0, step)) + step
    field = moved.masked_fill_(floor == EXPONENT_MASK, EXPONENT_MASK)
    q.mul_(inverse_power_of_two(field))
    round_element(q, element, fmt.rounding, None, magic)
    scale = power_of_two(field)
    q.clamp_max_(element.max).mul_(scale)
    q.copysign_(x_OBKI)
    limit = (element.max * scale).expand_as(q)
    whole = (t.reshape(padded.shape)[..., :extent] for t in (q, limit))
    values, limits = whole
    return values, limits
