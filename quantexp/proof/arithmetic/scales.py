"""The scale of a tensor, and the factors d by which blocks are divided.

    MX          d = 2^s              NVFP4, grid     d = b t        t the scale of the tensor, b that of the block

b is the value of the scale's grid that the rule takes for amax / t / max (MX: amax); float32, one rounding for each
operation. The definitions are those of `quantexp.formats`: `mx_scale`, `nv`, `tensor_scale`, `declared.arithmetic`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from quantexp.formats.spec import QuantSpec
from quantexp.formats.table import BF16
from quantexp.formats.types import (
    BlockRule,
    BlockScale,
    BlockScaleKind,
    Choose,
    Element,
    Family,
    Rounding,
    ScaleRule,
    Scaling,
)
from quantexp.proof.arithmetic.layout import chunk_limit, memory_order
from quantexp.proof.arithmetic.rounding import MULTIPLIED, neighbours, rounded

#: The exponents of E8M0.
_LEAST, _MOST = -127, 127
_LEAST_NORMAL = -126
#: The rules that take the next power of two from an amax on; the others only beyond it.
_FROM_EQUAL = (ScaleRule.FLOOR, ScaleRule.EVEN)
#: The scales that the rule `search` tries: halves of rceil's, or parts of amax / max.
_HALVES = (1.0, 0.5, 0.25)
_PARTS = tuple((32 - part) / 32 for part in range(17))
#: Errors of two scales that differ by less are equal.
_TIE = 2.0**-44


def finite_amax(v: Tensor) -> Tensor:
    """The largest finite magnitude, 0-dim float32; 0 if there is none. Bits of magnitudes are ordered as integers."""
    bits = torch.int32 if v.dtype == torch.float32 else torch.int16
    infinity = int(torch.tensor(math.inf, dtype=v.dtype, device="cpu").view(bits))
    codes_N = v.permute(memory_order(v)).reshape(-1).view(bits)
    largest = 0
    for part in torch.split(codes_N, chunk_limit(v)):
        magnitudes = part & torch.iinfo(bits).max
        top = int(magnitudes.amax()) if part.numel() else 0
        if top >= infinity:
            top = int(magnitudes.masked_fill_(magnitudes >= infinity, 0).amax())
        largest = max(largest, top)
    return torch.full((), largest, dtype=bits, device=v.device).view(v.dtype).float()


def tensor_scale(spec: QuantSpec, amax: float) -> float:
    """The scale of a tensor, as a float that float32 represents; 1 if it has none, or no amax above 0.

    By powers of two, FP8 and HiF8 are multiplied by the largest s with amax s <= target, and the other families divided
    by its inverse; exactly, they are by target / amax and its inverse, rounded to float64 and then to float32. A scale
    is a normal number, also times the smallest block scale.
    """
    if spec.scaling is Scaling.NONE or not 0 < amax < math.inf:
        return 1.0
    is_multiplied, target = spec.fmt.family in MULTIPLIED, spec.amax_target
    if spec.scaling is Scaling.EXACT:
        scale = target / amax if is_multiplied else amax / target
    else:
        (mantissa, exponent), (most, power) = math.frexp(amax), math.frexp(target)
        power = min(max(power - exponent - (mantissa > most), _LEAST_NORMAL), _MOST)
        scale = 2.0 ** (power if is_multiplied else -power)
    grid = spec.fmt.block_scale or (spec.fmt.grid_scale.element if spec.fmt.grid_scale else None)
    least = _LEAST_NORMAL - (0 if grid is None else grid.emin - grid.mantissa_bits)
    scale = min(max(scale, 2.0**least), 2.0**_MOST)
    return float(torch.tensor(scale, dtype=torch.float32, device="cpu"))


def divisors(v_OBKI: Tensor, spec: QuantSpec, t: Tensor) -> Tensor:
    """d of each block from its amax, with extent 1 along K; without blocks t, the tensor's scale, 0-dim float32."""
    if spec.fmt.block is None:
        return t
    return divisors_of(v_OBKI.abs().amax(dim=2, keepdim=True), spec, t)


def scales(v_OBKI: Tensor, spec: QuantSpec, t: Tensor) -> tuple[Tensor, Tensor]:
    """b of each block of the family grid, and the number of its element, 0 for the format's own."""
    amax = v_OBKI.abs().amax(dim=2, keepdim=True)
    grid = spec.fmt.grid_scale
    assert grid is not None, "the family grid"
    number = torch.zeros_like(amax, dtype=torch.int64)
    if grid.is_chosen:
        b, number = _chosen(v_OBKI, amax, spec, t)
    else:
        b = _scale(amax / t * 2.0 ** -len(grid.micro_exponents), spec.fmt.element, grid)
    return b.masked_fill(~amax.isfinite(), math.nan), number


def is_of_amax(spec: QuantSpec) -> bool:
    """Whether a block has one scale, which follows from its amax."""
    return spec.fmt.grid_scale is None or spec.fmt.grid_scale.is_of_amax


def divisors_of(amax: Tensor, spec: QuantSpec, t: Tensor) -> Tensor:
    """d of blocks with these amaxes, float32; NaN if an amax is not finite. All of it follows from the amax."""
    element, grid = spec.fmt.element, spec.fmt.grid_scale
    if spec.fmt.family is Family.MX:
        return _power(amax, element, spec.scale_rule)
    if grid is None:
        assert spec.fmt.block_scale is not None, "NVFP4"
        over = amax / _number(element.max, amax) / t
        d = _on_scales(over, spec.fmt.block_scale, BlockRule.EXACT) * t
    else:
        d = _scale(amax / t, element, grid) * t
    return d.masked_fill(~amax.isfinite(), math.nan)


def _number(value: float, like: Tensor) -> Tensor:
    """A divisor; torch multiplies by the reciprocal of a Python number."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _power(amax: Tensor, element: Element, rule: ScaleRule) -> Tensor:
    """The power of two 2^s of each block, s in [-127, 127]; by `floor`, s = floor(log2 amax) - emax.

    The other rules add 1: if amax's mantissa, in [1/2, 1), is above that of a power of two (`ceil`) or of max
    (`rceil`), or if it becomes 1 when it is rounded half up to the element's bits (`even`). NaN if amax is not finite.
    """
    powers, amaxes = _powers(element, rule, amax.device)
    return powers[torch.bucketize(amax.double(), amaxes, right=rule in _FROM_EQUAL)]


@lru_cache(maxsize=64)
def _powers(element: Element, rule: ScaleRule, device: torch.device) -> tuple[Tensor, Tensor]:
    """All powers of two, NaN; and the amaxes, float64, from which on or beyond which each but the first is taken."""
    most = math.inf if rule in _FROM_EQUAL else torch.finfo(torch.float32).max
    mantissa = {
        ScaleRule.FLOOR: 1.0,
        ScaleRule.EVEN: 1 - 2.0 ** -(element.mantissa_bits + 2),
        ScaleRule.CEIL: 0.5,
        ScaleRule.RCEIL: math.frexp(element.max)[0],
    }[rule]
    powers = [*(2.0**s for s in range(_LEAST, _MOST + 1)), math.nan]
    amaxes = [min(mantissa * s * 2.0**element.emax, most) for s in powers[1:-1]]
    return (
        torch.tensor(powers, dtype=torch.float32, device=device),
        torch.tensor([*amaxes, most], dtype=torch.float64, device=device),
    )


def _scale(ratio: Tensor, element: Element, grid: BlockScale) -> Tensor:
    """b of blocks from amax / t."""
    if grid.kind is BlockScaleKind.E8M0:
        return _power(ratio, element, ScaleRule(grid.rule.value))
    return _on_grid(ratio / _number(element.max, ratio), grid, grid.rule)


def _on_grid(over: Tensor, grid: BlockScale, rule: BlockRule) -> Tensor:
    """amax / t / max on the grid of a scale that is no power of two."""
    if grid.kind is BlockScaleKind.FP32:
        return over.clamp_min(2.0**_LEAST_NORMAL).masked_fill_(over == 0, 1.0)
    return _on_scales(over, grid.element or BF16, rule)


def _on_scales(over: Tensor, element: Element, rule: BlockRule) -> Tensor:
    """The lower or the higher neighbour among an element's positive values, or the nearer, a tie to even."""
    values = scale_values(element, over.device)
    inside, above = neighbours(over, values)
    low, high = values[above - 1], values[above]
    if rule is BlockRule.FLOOR:
        is_up = inside >= high
    elif rule is BlockRule.CEIL:
        is_up = inside > low
    else:
        is_odd = torch.remainder(low / (high - low), 2) == 1
        is_up = (2 * inside > low + high) | ((2 * inside == low + high) & is_odd)
    return torch.where(is_up, high, low).float()


@lru_cache(maxsize=32)
def scale_values(element: Element, device: torch.device) -> Tensor:
    """The positive finite values of block scales in ascending order, float64; of bf16, the normal ones."""
    steps, least = 1 << element.mantissa_bits, element.emin - element.mantissa_bits
    values = [] if element == BF16 else [n * 2.0**least for n in range(1, steps)]
    for exponent in range(least, element.emax - element.mantissa_bits + 1):
        values += [(steps + n) * 2.0**exponent for n in range(steps)]
    values = [value for value in values if value <= element.max]
    return torch.tensor(values, dtype=torch.float64, device=device)


def _chosen(v_OBKI: Tensor, amax: Tensor, spec: QuantSpec, t: Tensor) -> tuple[Tensor, Tensor]:
    """b of each block and the number of its element: the first of those tried with the least error, rounded to even."""
    grid, ratio = spec.fmt.grid_scale, amax / t
    assert grid is not None, "chosen"
    tried, numbers, errors = [], [], []
    for number, element in enumerate((spec.fmt.element, *grid.others)):
        for b in _tried(ratio, element, grid):
            q = rounded(v_OBKI / (b * t), element, Rounding.EVEN, None, saturates=True)
            tried.append(b)
            numbers.append(torch.full_like(b, number, dtype=torch.int64))
            errors.append(_error(v_OBKI.double() - (q * (b * t)).double(), grid.choose))
    every = torch.stack(errors)
    is_enough = every <= every.amin(dim=0) * (1 + _TIE)
    first = is_enough.to(torch.int8).argmax(dim=0, keepdim=True)  # of no number the first
    best, of_best = (torch.stack(each).gather(0, first)[0] for each in (tried, numbers))
    return best, of_best


def _tried(ratio: Tensor, element: Element, grid: BlockScale) -> list[Tensor]:
    """b of each block for each scale of an element that is tried."""
    if grid.candidates:
        return [_on_grid(ratio / _number(c, ratio), grid, grid.rule) for c in grid.candidates]
    if grid.rule is not BlockRule.SEARCH:
        return [_scale(ratio, element, grid)]
    if grid.kind is BlockScaleKind.E8M0:
        largest = _power(ratio, element, ScaleRule.RCEIL)
        return [(largest * factor).clamp_min_(2.0**_LEAST) for factor in _HALVES]
    over = ratio / _number(element.max, ratio)
    return [_on_grid(over * part, grid, BlockRule.EXACT) for part in _PARTS]


def _error(difference: Tensor, choose: Choose) -> Tensor:
    """The error of each block from the differences of its elements along dimension 2, float64."""
    if choose is Choose.MAX:
        return difference.abs().amax(dim=2, keepdim=True)
    power = 2 if choose is Choose.MSE else 1
    return difference.abs().pow(power).sum(dim=2, keepdim=True)
