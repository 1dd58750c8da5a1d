"""Images under scales of several levels, or of one of several elements (`quantexp.formats.declared` defines them).

chosen      the element and the scale of each block with the least error
macro       a scale of each macro block, as of a tensor
groups      a group's factor 2 from the binade of its amax in units of the scale
corrected   the scales of several blocks times a quotient of two sums of integers, on their grid again
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats.spec import QuantSpec
from quantexp.formats.table import BF16
from quantexp.formats.types import BlockScale, BlockScaleKind, Rounding, Scaling
from quantexp.proof.arithmetic.philox import RANDOM_BITS
from quantexp.proof.arithmetic.rounding import neighbours, rounded
from quantexp.proof.arithmetic.scales import scale_values, scales

#: float32's smallest normal number: the least float32 scale; and its exponent and the largest.
_LEAST_NORMAL = 2.0**-126
_LEAST, _MOST = -126, 127


def of_levels(v_OBKI: Tensor, spec: QuantSpec, t: Tensor, random_OBKI: Tensor | None) -> Tensor:
    """The images of v, float32, in blocks whose scales do not follow from their amax alone."""
    grid = spec.fmt.grid_scale
    assert grid is not None, "the family grid"
    if grid.macro is not Scaling.NONE:
        return _in_macro_blocks(v_OBKI, spec, random_OBKI)
    if grid.corrected:
        return _corrected(v_OBKI, spec, t, random_OBKI)
    b, number = scales(v_OBKI, spec, t)
    d = b * t
    for level, size in enumerate(grid.micro_exponents):
        rest = len(grid.micro_exponents) - level
        amax = _over_groups(v_OBKI.abs() / d, size)
        # frexp's mantissa is below 1: an exponent of n stands for 2^(n - 1) to 2^n.
        doubles = torch.frexp(amax).exponent > spec.fmt.element.emax + rest
        d = torch.where(doubles, d + d, d)
    return _rounded(v_OBKI / d, number, spec, spec.rounding, random_OBKI) * d


def _in_macro_blocks(v_OBKI: Tensor, spec: QuantSpec, random_OBKI: Tensor | None) -> Tensor:
    """Each macro block under a scale of its own, its blocks or groups of blocks one after another along K."""
    grid = spec.fmt.grid_scale
    assert grid is not None, "macro blocks"
    amax = v_OBKI.abs().amax(dim=2, keepdim=True)
    t = _macro_scale(amax, grid)
    size = grid.corrected or grid.each
    assert size is not None, "blocks of macro blocks"
    plain = replace(grid, macro=Scaling.NONE, each=grid.each if grid.corrected else None)
    own = replace(spec, block=size, fmt=replace(spec.fmt, block=size, grid_scale=plain))
    draws: tuple[Tensor | None, ...] = ()
    if random_OBKI is not None:
        draws = torch.split(random_OBKI, size, dim=2)
    images = [
        of_levels(part, own, t, draws[number] if draws else None)
        for number, part in enumerate(torch.split(v_OBKI, size, dim=2))
    ]
    return torch.cat(images, dim=2).masked_fill_(~amax.isfinite(), math.nan)


def _macro_scale(amax: Tensor, grid: BlockScale) -> Tensor:
    """t of macro blocks by their amaxes: what a tensor with this amax would have."""
    wide, target = amax.double(), grid.macro_target
    if grid.macro is Scaling.EXACT:
        t = wide / torch.full_like(wide, target)
    else:
        mantissas, exponents = torch.frexp(wide)
        most, power = math.frexp(target)
        up = (exponents - power + (mantissas > most)).clamp(-_MOST, -_LEAST)
        t = torch.full_like(wide, 2.0).pow(up)
    element = grid.element
    least = _LEAST - (0 if element is None else element.emin - element.mantissa_bits)
    is_scale = (amax > 0) & amax.isfinite()
    return t.masked_fill(~is_scale, 1.0).clamp(2.0**least, 2.0**_MOST).float()


def _over_groups(magnitudes_OBKI: Tensor, size: int) -> Tensor:
    """The largest of each group along K, in the place of each of its elements."""
    parts = torch.split(magnitudes_OBKI, size, dim=2)
    return torch.cat([part.amax(dim=2, keepdim=True).expand_as(part) for part in parts], dim=2)


def _rounded(
    v_OBKI: Tensor, number: Tensor, spec: QuantSpec, rounding: Rounding, random: Tensor | None
) -> Tensor:
    """v on the grid of its block's element."""
    assert spec.fmt.grid_scale is not None, "the family grid"
    elements = (spec.fmt.element, *spec.fmt.grid_scale.others)
    each = [rounded(v_OBKI, one, rounding, random, saturates=True) for one in elements]
    return torch.stack(each).gather(0, number.expand_as(v_OBKI).unsqueeze(0))[0]


def _corrected(v_OBKI: Tensor, spec: QuantSpec, t: Tensor, random_OBKI: Tensor | None) -> Tensor:
    """Groups of blocks, one after another along K."""
    grid = spec.fmt.grid_scale
    assert grid is not None
    assert grid.each is not None, "scales that share a correction"
    plain = replace(grid, each=None, corrected=None)
    block = replace(spec, fmt=replace(spec.fmt, grid_scale=plain))
    is_random = spec.rounding is Rounding.STOCHASTIC
    limit = 2 * max(element.max for element in (spec.fmt.element, *grid.others))
    _, exponent = math.frexp(limit * limit * spec.block)
    signal = cross = torch.zeros((), dtype=torch.int64, device=v_OBKI.device)
    is_finite = v_OBKI.isfinite().all(dim=2, keepdim=True)
    made = []
    for part in torch.split(v_OBKI, grid.each, dim=2):
        b, number = scales(part, block, t)
        v = part / (b * t)
        rounding = Rounding.EVEN if is_random else spec.rounding
        q = _rounded(v, number, block, rounding, None)
        wide = v.double().clamp(-limit, limit)
        signal = signal + _integers(wide * wide, 52 - exponent)
        cross = cross + _integers(wide * q.double(), 52 - exponent)
        made.append((b, q))
    quotient = (signal.double() / cross.double().masked_fill(cross == 0, 1.0)).float()
    c = torch.where(cross == 0, torch.ones_like(quotient), quotient)
    draws: list[Tensor | None] = [None] * len(made)
    if is_random:
        assert random_OBKI is not None, "stochastic rounding has random numbers"
        draws = [each[:, :, :1] for each in torch.split(random_OBKI, grid.each, dim=2)]
    images = [
        q * (_on_grid(b * c, grid, draw) * t) for (b, q), draw in zip(made, draws, strict=True)
    ]
    return torch.cat(images, dim=2).masked_fill_(~is_finite, math.nan)


def _integers(terms: Tensor, exponent: int) -> Tensor:
    """The sum over K of terms in units of 2^-exponent, each rounded to an integer; NaN counts as zero."""
    whole = (terms * 2.0**exponent).nan_to_num(0.0).round().to(torch.int64)
    return whole.sum(dim=2, keepdim=True)


def _on_grid(target: Tensor, grid: BlockScale, random: Tensor | None) -> Tensor:
    """Scales on their grid: the higher neighbour at random, or the nearer, a tie to even."""
    if grid.kind is BlockScaleKind.FP32:
        return target.clamp_min(_LEAST_NORMAL).masked_fill(target == 0, 1.0)
    inside, above = neighbours(target, scale_values(grid.element or BF16, target.device))
    values = scale_values(grid.element or BF16, target.device)
    low, high = values[above - 1], values[above]
    if random is not None:
        is_up = random < ((inside - low) / (high - low) * 2.0**RANDOM_BITS).floor()
    else:
        is_odd = torch.remainder(low / (high - low), 2) == 1
        is_up = (2 * inside > low + high) | ((2 * inside == low + high) & is_odd)
    return torch.where(is_up, high, low).float()
