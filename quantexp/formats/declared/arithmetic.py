"""The family `grid`: any element in blocks of any shape, each under a scale of any kind.

For a tensor scale t (see `families`; 1 without one) and a block x, in float32, with each operation rounded once:

    b = rule(max |x| / t / max)      d = b t      q = e(x / d)      y = q d

max is the element's largest value, and e rounds to the element's values, from the lowest to the largest. A scale of
powers of two follows the rules of MX from the bits of max |x| / t, and all other steps are exact if t is a power of
two. Any other scale is rounded to a value of its own grid, from the smallest positive to the largest; a float32 scale
is at least 2^-126. The scale of a zero block is the smallest of its grid, 1 for float32. Without blocks d = t.

With candidates c, each gives a scale b = rule(max |x| / t / c), and the block takes the first with the least error: the
sum of (x - y)^2 (`mse`), the sum of |x - y| (`mae`) or the largest |x - y| (`max`), to a part in 2^44, with y rounded
to nearest even, and before it is rounded to the dtype. `search` chooses as well, among scales up to that of the amax:
for powers of two rceil's, a half and a quarter of it; for others 32/32 down to 16/32 of amax / max, rounded to the
nearest. A block that may take one of several elements tries the scales of each, for its own largest value, and takes
the first element and scale with the least error.

Scales of several levels, micro-exponents and those that share a correction, are in `levels`.

Ties: `even` takes the value with the even code; of a list of values, the one at an even place, counted from zero
outwards, and the positive one if both are odd. `away` takes the larger magnitude, and the positive one if both are
equal. Stochastic rounding is that of `rounding`, with the fraction computed in float64 for a list of values.

A NaN or an Inf anywhere in a block makes the whole block NaN. Without blocks NaN stays, and Inf becomes the largest
value. Signed zeros keep their sign if the element has a negative zero.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from quantexp.formats.codes import code_values
from quantexp.formats.declared.lists import on_list
from quantexp.formats.families import nearest_scale
from quantexp.formats.layout import Chunk, chunk_limit, chunks
from quantexp.formats.rounding import (
    EXPONENT_MASK,
    MANTISSA_BITS,
    as_bits,
    break_ties,
    from_bits,
    power_of_two,
    round_down,
    round_element,
    round_to_multiples,
    scale_field,
    spacing_to,
)
from quantexp.formats.spec import QuantSpec
from quantexp.formats.table import HIF8, MOST_MAGIC
from quantexp.formats.types import (
    BlockRule,
    BlockScale,
    BlockScaleKind,
    Choose,
    Element,
    Format,
    Rounding,
    ScaleRule,
)

#: Factors of the scales that `search` tries, for powers of two relative to rceil's.
POWER_FACTORS = (1.0, 0.5, 0.25)
#: The same for all other scales, relative to amax / max.
FACTORS = tuple((32 - k) / 32 for k in range(17))
_SMALLEST_FLOAT32_SCALE = 2.0**-126
#: Errors of two scales that differ by less are equal to `search`, whatever the order of their sums.
_TIE = 2.0**-44


def grid_chunks(x_ONI: Tensor, spec: QuantSpec) -> list[Chunk]:
    """Chunks of whole blocks; of a format without blocks, of any elements."""
    o, n, i = x_ONI.shape
    block = min(spec.block, max(n, 1)) if spec.fmt.block is not None else 1
    return list(chunks((o, n, i), block, chunk_limit(x_ONI.device)))


def block_factors(x_OBKI: Tensor, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    """d of each block, float32, with extent 1 along K; NaN for a block with NaN or Inf, 0-dim without blocks.

    Of blocks that are several, see `levels`.
    """
    if spec.fmt.grid_scale is None:
        return x_OBKI.new_ones(()) if scale is None else scale
    b, _ = block_scales(x_OBKI, spec, scale)
    return b if scale is None else b * scale


def block_scales(
    x_OBKI: Tensor, spec: QuantSpec, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """b of each block, float32, with extent 1 along K; NaN for a block with NaN or Inf. And which element it takes."""
    block_scale, which = spec.fmt.grid_scale, None
    assert block_scale is not None, "blocks"
    amax = x_OBKI.abs().amax(dim=2, keepdim=True)
    ratio = amax if scale is None else amax / scale
    if block_scale.is_chosen:
        b, which = _chosen(x_OBKI, ratio, spec, block_scale, scale)
    else:
        ratio = ratio * 2.0 ** -len(block_scale.micro_exponents)
        b = _scale_of(ratio, spec.fmt.element, block_scale)
    return b.masked_fill(~amax.isfinite(), math.nan), which


def _scale_of(ratio: Tensor, element: Element, scale: BlockScale) -> Tensor:
    """b of each block from max |x| / t; undefined where that is not finite."""
    if scale.kind is BlockScaleKind.E8M0:
        return power_of_two(scale_field(as_bits(ratio), element, ScaleRule(scale.rule.value)))
    return on_scale_grid(_over(ratio, element.max), scale, scale.rule)


def _over(ratio: Tensor, largest: float) -> Tensor:
    """amax / max; the divisor is a tensor because CUDA multiplies by the reciprocal of a Python number."""
    return ratio / torch.full((), largest, dtype=torch.float32, device=ratio.device)


def on_scale_grid(ratio: Tensor, scale: BlockScale, rule: BlockRule) -> Tensor:
    """Ratios >= 0, float32, on the grid of a scale that is no power of two."""
    if scale.kind is BlockScaleKind.FP32:
        return ratio.clamp_min(_SMALLEST_FLOAT32_SCALE).masked_fill_(ratio == 0, 1.0)
    if rule in (BlockRule.EXACT, BlockRule.SEARCH):
        if scale.kind is BlockScaleKind.BF16:
            nearest = ratio.to(torch.bfloat16).to(torch.float32)
            grid = scale_grid(scale, ratio.device)
            return nearest.clamp_(grid[0], grid[-1])
        assert scale.element is not None
        return nearest_scale(ratio.clone(), scale.element)
    grid = scale_grid(scale, ratio.device)
    place = torch.searchsorted(grid, ratio.contiguous(), right=rule is BlockRule.FLOOR)
    return grid[(place - int(rule is BlockRule.FLOOR)).clamp_(0, grid.numel() - 1)]


@lru_cache(maxsize=32)
def scale_grid(scale: BlockScale, device: torch.device) -> Tensor:
    """The positive finite values of block scales that are small floats or bf16, ascending, float32."""
    if scale.kind is BlockScaleKind.BF16:
        bits = torch.arange(1 << 7, 0x7F80, dtype=torch.int32, device=device)  # the normal numbers
        return from_bits(bits << 16)
    assert scale.element is not None
    values = [v for v in code_values(scale.element) if 0 < v < math.inf]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def _chosen(
    x_OBKI: Tensor, ratio: Tensor, spec: QuantSpec, scale: BlockScale, t: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """b of each block, and the number of its element, chosen among several."""
    elements = (spec.fmt.element, *scale.others)
    tried = [
        (b, number)
        for number, element in enumerate(elements)
        for b in candidates(ratio, element, scale)
    ]
    best, which = tried[0][0], torch.zeros_like(ratio, dtype=torch.int64)
    errors = [
        _error(x_OBKI, b if t is None else b * t, elements[number], scale.choose)
        for b, number in (tried if len(tried) > 1 else [])
    ]
    least = torch.stack(errors).amin(dim=0) if errors else None
    for (b, number), error in zip(reversed(tried), reversed(errors), strict=False):
        assert least is not None, "errors"
        is_best = error <= least * (1 + _TIE)
        best = torch.where(is_best, b, best)
        which = which.masked_fill(is_best, number)
    return best, which if scale.others else None


def candidates(ratio: Tensor, element: Element, scale: BlockScale) -> list[Tensor]:
    """b of each block for every scale of an element that is tried, in their order."""
    if scale.candidates:
        return [on_scale_grid(_over(ratio, c), scale, scale.rule) for c in scale.candidates]
    if scale.rule is not BlockRule.SEARCH:
        return [_scale_of(ratio, element, scale)]
    if scale.kind is BlockScaleKind.E8M0:
        first = power_of_two(scale_field(as_bits(ratio), element, ScaleRule.RCEIL))
        return [(first * factor).clamp_min_(2.0**-127) for factor in POWER_FACTORS]
    over = _over(ratio, element.max)
    return [on_scale_grid(over * factor, scale, BlockRule.SEARCH) for factor in FACTORS]


def _error(x_OBKI: Tensor, d: Tensor, element: Element, choose: Choose) -> Tensor:
    """The error of each block, float64, with extent 1 along K, rounded to nearest even."""
    y = rounded(x_OBKI / d, element, Rounding.EVEN, None) * d
    error = x_OBKI.double() - y.double()
    match choose:
        case Choose.MSE:
            return error.square_().sum(dim=2, keepdim=True)
        case Choose.MAE:
            return error.abs_().sum(dim=2, keepdim=True)
        case Choose.MAX:
            return error.abs_().amax(dim=2, keepdim=True)


def on_elements(
    v_OBKI: Tensor,
    which: Tensor | None,
    fmt: Format,
    rounding: Rounding,
    random: Tensor | None,
) -> Tensor:
    """v on the grid of its block's element, whose number is `which`."""
    q = rounded(v_OBKI, fmt.element, rounding, random)
    if which is not None:
        assert fmt.grid_scale is not None, "several elements"
        for number, element in enumerate(fmt.grid_scale.others, 1):
            q = torch.where(which == number, rounded(v_OBKI, element, rounding, random), q)
    return q


def rounded(v: Tensor, element: Element, rounding: Rounding, random: Tensor | None) -> Tensor:
    """v, float32, on the element's grid, in a new tensor; NaN stays NaN."""
    if element.values:
        q = on_list(v, element, rounding, random)
    else:
        lowest = element.max if element.lowest is None else -element.lowest
        limit = torch.where(v < 0, lowest, element.max) if element.lowest is not None else None
        q = v.abs()
        q = q.clamp_max_(element.max) if limit is None else torch.minimum(q, limit)
        _round_magnitude(q, element, rounding, random)
        q = q.copysign_(v)
    return q if element.has_negative_zero else q + 0.0


def _round_magnitude(
    q: Tensor, element: Element, rounding: Rounding, random: Tensor | None
) -> None:
    """Round q >= 0 in place, at most the element's largest magnitude."""
    if element is HIF8:
        _round_hif8(q, rounding, random)
    elif element.emax - element.mantissa_bits > MOST_MAGIC:
        _round_wide(q, element, rounding, random)
    else:
        round_element(q, element, rounding, random, torch.empty_like(q))


def _round_hif8(q: Tensor, rounding: Rounding, random: Tensor | None) -> None:
    step, scratch = torch.empty_like(q), torch.empty_like(q)
    if not rounding.is_to_nearest:
        spacing_to(step, q, scratch)
        round_down(q, step, rounding, random)
    else:
        break_ties(q, rounding)
        spacing_to(step, q, scratch, factor=1.5 * 2.0**MANTISSA_BITS)
        round_to_multiples(q, step)


def _round_wide(q: Tensor, element: Element, rounding: Rounding, random: Tensor | None) -> None:
    """Round to a float whose largest binade the float adder cannot round, by its bits."""
    step = from_bits(as_bits(q) & EXPONENT_MASK).clamp_min_(2.0**element.emin)
    step.mul_(2.0**-element.mantissa_bits)
    if not rounding.is_to_nearest:
        round_down(q, step, rounding, random)
        return
    multiples = q / step  # exact, and at most 2^(mantissa bits + 1)
    if rounding is Rounding.EVEN:
        whole = multiples.round()
    else:
        whole = multiples.floor()
        whole += multiples - whole >= 0.5
    torch.mul(whole, step, out=q)
