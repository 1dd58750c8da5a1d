"""Values rounded to an element, and their images under the scale of a tensor or a block.

    FP8, HiF8      y = e(x s) / s
    all others     y = e(x / d) d        with p x / d if pre-scaled (arXiv 2502.20586)

Everything is float32 with one rounding for each operation; the quotient by the spacing of a binade is exact. A tie goes
to the even multiple of that spacing, or to the larger magnitude; towards zero, all goes to the multiple below. At
random, an element moves away from zero if its random number is below floor(2^24 f), with f the part of the spacing
beyond the multiple below.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from quantexp.formats.spec import QuantSpec
from quantexp.formats.table import HIF8
from quantexp.formats.types import Element, Family, Rounding
from quantexp.proof.arithmetic.philox import RANDOM_BITS

#: The families whose scale multiplies the source.
MULTIPLIED = (Family.FP8, Family.HIF8)
#: Mantissa bits of HiFloat8 up to a distance of the exponent from zero (arXiv 2409.16626, section 3).
_HIF8_BITS = ((3, 3), (7, 2), (15, 1), (22, 0))


def under(v: Tensor, d: Tensor, spec: QuantSpec, random: Tensor | None) -> Tensor:
    """The images of v, float32, under the factors d: of its blocks, or of the tensor."""
    is_multiplied = spec.fmt.family in MULTIPLIED
    scaled = v * d if is_multiplied else v / d
    if spec.is_pre_scaled:
        scaled *= spec.pre_scale
    q = rounded(scaled, spec.fmt.element, spec.rounding, random, saturates=spec.saturate)
    return q / d if is_multiplied else q * d


def rounded(
    v: Tensor, element: Element, rounding: Rounding, random: Tensor | None, *, saturates: bool
) -> Tensor:
    """v, float32, on the element's grid; NaN stays NaN.

    Beyond the largest value, it is that value if it saturates, else Inf, or NaN of an element without infinity.
    """
    if element.values:
        return _on_list(v, element, rounding, random)
    beyond = 1.0 if saturates else 2.0
    lowest = -element.max if element.lowest is None else element.lowest
    magnitude = v.clamp(beyond * lowest, beyond * element.max).abs_()
    binade = (magnitude.view(torch.int32) >> 23).view(-1)
    step = _steps(element, v.device).index_select(0, binade).view(v.shape)
    q = _whole(magnitude.div_(step), rounding, random).mul_(step)
    if not saturates:
        q.masked_fill_(q > element.max, math.inf if element.inf_codes else math.nan)
    q.copysign_(v)
    return q if element.has_negative_zero else q.add_(0.0)


def slopes(v: Tensor, d: Tensor, spec: QuantSpec, power: float) -> Tensor:
    """The derivative of DGE (arXiv 2501.17116, equation 8) of v, float32, under the factors d; float64, at most 3.

    With p the part of the spacing by which v / d lies beyond the value below, it is |2 p - 1|^(1/power - 1) / power; 0
    beyond the largest magnitude, 1 where the factor is NaN.
    """
    element = spec.fmt.element
    magnitude = (v * d if spec.fmt.family in MULTIPLIED else v / d).abs_()
    if element.values:
        ascending = sorted({abs(each) for each in element.values})
        values = torch.tensor(ascending, dtype=torch.float64, device=v.device)
        inside, above = neighbours(magnitude, values)
        low, high = values[above - 1], values[above]
        share, largest = (inside - low) / (high - low), float(values[-1])
    else:
        step = _steps(element, v.device)[magnitude.view(torch.int32) >> 23]
        share = (magnitude.double() / step).frac_()
        largest = max(element.max, -(element.lowest or 0.0))
    slope = (2 * share - 1).abs_().pow_(1 / power - 1).div_(power).clamp_max_(3.0)
    return slope.masked_fill_(magnitude > largest, 0.0).masked_fill_(~magnitude.isfinite(), 1.0)


def noise(v: Tensor, d: Tensor, spec: QuantSpec) -> Tensor:
    """The derivative by v of the variance of v's stochastic rounding under constant factors d, float64.

    That of (size - low) (high - size) v^2 / size^2, where size is the magnitude of v / d between two values; 0 at
    these, from the largest one on, and where the factor is NaN.
    """
    element = spec.fmt.element
    size = (v * d if spec.fmt.family in MULTIPLIED else v / d).abs_()
    if element.values:
        values = torch.tensor(sorted({abs(each) for each in element.values}), dtype=torch.float64)
        values = values.to(v.device)
        _, above = neighbours(size, values)
        low, high, largest = values[above - 1], values[above], float(values[-1])
    else:
        step = _steps(element, v.device)[size.view(torch.int32) >> 23].double()
        low = (size.double() / step).floor_() * step
        high, largest = low + step, max(element.max, -(element.lowest or 0.0))
    wide = size.double()
    slope = (low + high - 2 * wide) * (v.double() / wide)
    return torch.where((wide > low) & (wide < largest), slope, 0.0)


def _whole(multiples: Tensor, rounding: Rounding, random: Tensor | None) -> Tensor:
    """Multiples >= 0 of a spacing (overwritten) as whole ones."""
    if rounding is Rounding.EVEN:
        return multiples.round_()
    if rounding is Rounding.ZERO:
        return multiples.floor_()
    whole = multiples.floor()
    share = multiples.sub_(whole)
    if rounding is Rounding.AWAY:
        return whole.add_(share >= 0.5)
    assert random is not None, "stochastic rounding has random numbers"
    return whole.add_(random < share.mul_(2.0**RANDOM_BITS).floor_())


@lru_cache(maxsize=64)
def _steps(element: Element, device: torch.device) -> Tensor:
    """The spacing of an element's values in each binade of float32, by the exponent field; beyond, as in the last."""
    highest = element.emax if element == HIF8 else 127
    exponents = [min(max(field - 127, element.emin), highest) for field in range(256)]
    steps = [2.0 ** (exponent - _mantissa_bits(element, exponent)) for exponent in exponents]
    return torch.tensor(steps, dtype=torch.float32, device=device)


def _mantissa_bits(element: Element, exponent: int) -> int:
    if element != HIF8:
        return element.mantissa_bits
    return next(bits for furthest, bits in _HIF8_BITS if abs(exponent) <= furthest)


def neighbours(v: Tensor, ascending: Tensor) -> tuple[Tensor, Tensor]:
    """v between the first and the last of some values, and the place of the value above it, at least 1.

    Both values and result are float64, in which the middle between two float32 values is exact.
    """
    inside = v.double().clamp(ascending[0], ascending[-1]).contiguous()
    above = torch.searchsorted(ascending, inside, right=True)
    return inside, above.clamp_(1, ascending.numel() - 1)


def _on_list(v: Tensor, element: Element, rounding: Rounding, random: Tensor | None) -> Tensor:
    """v on a list of values, float32.

    A tie goes to the value at an even place, counted from zero outwards, or to the larger magnitude (`away`), and to
    the positive one if that decides nothing.
    """
    values, is_even = _list_tables(element, v.device)
    inside, above = neighbours(v, values)
    low, high = values[above - 1], values[above]
    if rounding is Rounding.STOCHASTIC:
        assert random is not None, "stochastic rounding has random numbers"
        share, is_negative = (inside - low) / (high - low), low + high < 0
        share = torch.where(is_negative, 1 - share, share)
        is_up = (random < (share * 2.0**RANDOM_BITS).floor()) ^ is_negative
    elif rounding is Rounding.ZERO:
        is_up = ((low + high < 0) & (inside > low)) | (inside == high)
    else:
        is_away = rounding is Rounding.AWAY
        wins = high.abs() >= low.abs() if is_away else is_even[above] | ~is_even[above - 1]
        is_up = (2 * inside > low + high) | ((2 * inside == low + high) & wins)
    return torch.where(is_up, high, low).masked_fill_(v.isnan(), math.nan).float()


@lru_cache(maxsize=64)
def _list_tables(element: Element, device: torch.device) -> tuple[Tensor, Tensor]:
    """The values, float64, and whether each is at an even place, counted from zero outwards."""
    num_negative = sum(value < 0 for value in element.values)
    first = num_negative if 0.0 in element.values else num_negative - 0.5
    places = [round(abs(index - first) + (first % 1)) for index in range(len(element.values))]
    values = torch.tensor(element.values, dtype=torch.float64, device=device)
    return values, torch.tensor([place % 2 == 0 for place in places], device=device)
