"""Quantises to any grid, under scales of one level (`arithmetic`) or of several.

**Micro-exponents** (HiFloat4, arXiv 2604.08826; shared microexponents, arXiv 2302.08007). With L levels of groups, each
in the one before, a block has the scale b = rule(amax / t / 2^L / max). A group of level l doubles d if its amax, in
units of d so far, reaches 2^(emax + 1 + L - l): the power of two after the largest value that it has otherwise.

**Macro blocks**, or rows, have a scale t each, which follows from their amax as that of a tensor does; all else is as
under a tensor's t. A NaN or an Inf makes the whole macro block NaN.

**Correction** (MS-EDEN, arXiv 2601.22813). The blocks of G elements have scales b and elements q = e(x / (b t)),
rounded to nearest. With v = x / (b t), and sums over the G elements,

    c = sum v^2 / sum v q      b' = round(b c)      y = q (b' t)

b c is rounded to the grid of scales, stochastically or to nearest as the format's rounding says: of a random transform
of x the result then has no bias (EDEN). v is limited to twice the largest value of the elements, and the terms of both
sums to multiples of a power of two, so that the sums are exact in any order. c is float32, and 1 if all q are zero. A
NaN or an Inf makes all G elements NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats.declared.arithmetic import (
    block_factors,
    block_scales,
    grid_chunks,
    on_elements,
    on_scale_grid,
    rounded,
    scale_grid,
)
from quantexp.formats.families import scale_of_amax
from quantexp.formats.rounding import RANDOM_BITS
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import (
    BlockRule,
    BlockScale,
    BlockScaleKind,
    Element,
    Rounding,
    Scaling,
)

#: Bits of an integer that float64 holds.
_SUM_BITS = 52


def quantise_grid(
    x_ONI: Tensor,
    y_ONI: Tensor,
    spec: QuantSpec,
    scale: Tensor | None,
    random_ONI: Tensor | None = None,
) -> None:
    """Write the quantised x to y, which may be x itself; `scale` is t, None means 1.

    `random_ONI` is for stochastic rounding, see `rounding`.
    """
    for chunk in grid_chunks(x_ONI, spec):
        x_OBKI = chunk.elements(x_ONI).to(torch.float32)
        random = None if random_ONI is None else chunk.elements(random_ONI)
        chunk.elements(y_ONI).copy_(_images(x_OBKI, spec, scale, random))


def _images(x_OBKI: Tensor, spec: QuantSpec, scale: Tensor | None, random: Tensor | None) -> Tensor:
    """The quantised x, float32; `scale` is t, of the tensor or of each block."""
    block_scale = spec.fmt.grid_scale
    if block_scale is None or block_scale.is_of_amax:
        d = block_factors(x_OBKI, spec, scale)
        return rounded(x_OBKI / d, spec.fmt.element, spec.rounding, random) * d
    if block_scale.each:
        return _of_groups(x_OBKI, spec, scale, random)
    d, which = factors(x_OBKI, spec, scale)
    return on_elements(x_OBKI / d, which, spec.fmt, spec.rounding, random) * d


def factors(x_OBKI: Tensor, spec: QuantSpec, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """d of each element, and the number of its block's element; None if there is one."""
    block_scale = spec.fmt.grid_scale
    assert block_scale is not None, "blocks"
    b, which = block_scales(x_OBKI, spec, scale)
    d = b if scale is None else b * scale
    if block_scale.micro_exponents:
        d = _with_micro_exponents(x_OBKI, d, spec.fmt.element, block_scale.micro_exponents)
    return d, which


def _with_micro_exponents(
    x_OBKI: Tensor, d_OB1I: Tensor, element: Element, sizes: tuple[int, ...]
) -> Tensor:
    """d of each element: that of its block, doubled for each of its groups that needs it."""
    extent = x_OBKI.shape[2]
    v = x_OBKI.abs() / d_OB1I
    d = d_OB1I.expand_as(v)
    for level, size in enumerate(sizes):
        limit = 2.0 ** (element.emax + len(sizes) - level)
        amax = _split(v, size).amax(dim=3, keepdim=True)
        factor = torch.where(amax >= limit, 2.0, 1.0).expand(-1, -1, -1, size, -1)
        factor = factor.flatten(2, 3)[:, :, :extent]
        v, d = v / factor, d * factor
    return d


def _of_groups(
    x_OBKI: Tensor, spec: QuantSpec, scale: Tensor | None, random_OBKI: Tensor | None
) -> Tensor:
    """The images of macro blocks, or of groups of blocks whose scales share a correction."""
    block_scale = spec.fmt.grid_scale
    assert block_scale is not None, "several blocks"
    if block_scale.macro is Scaling.NONE:
        return _corrected(x_OBKI, spec, scale, random_OBKI)
    inner = inner_blocks(spec)
    size, (_, b, extent, _) = min(inner.block, x_OBKI.shape[2]), x_OBKI.shape
    parts = _split(x_OBKI, size)
    t = _macro_scales(x_OBKI, spec).unsqueeze(2).expand(-1, -1, parts.shape[2], -1, -1)
    random = None if random_OBKI is None else _split(random_OBKI, size).flatten(1, 2)
    y = _images(parts.flatten(1, 2), inner, t.flatten(1, 2), random)
    joined: Tensor = torch.unflatten(y, 1, (b, -1)).flatten(2, 3)
    return joined[:, :, :extent]


def inner_blocks(spec: QuantSpec) -> QuantSpec:
    """The specification of the blocks, or groups of blocks, in a macro block; or of the blocks in such a group."""
    scale = spec.fmt.grid_scale
    assert scale is not None
    assert scale.each is not None, "several blocks"
    is_group = scale.macro is not Scaling.NONE and scale.corrected is not None
    size = scale.corrected if is_group else scale.each
    assert size is not None
    own = replace(
        scale,
        macro=Scaling.NONE,
        corrected=scale.corrected if is_group else None,
        each=scale.each if is_group else None,
    )
    return replace(spec, block=size, fmt=replace(spec.fmt, block=size, grid_scale=own))


def _macro_scales(x_OBKI: Tensor, spec: QuantSpec) -> Tensor:
    """t of each macro block, with extent 1 along K; NaN for one with NaN or Inf."""
    scale = spec.fmt.grid_scale
    assert scale is not None
    amax = x_OBKI.abs().amax(dim=2, keepdim=True)
    of_tensor = replace(spec, scaling=scale.macro, amax_target=scale.macro_target)
    t = scale_of_amax(amax.double(), of_tensor, inverse=True)
    return t.masked_fill(~amax.isfinite(), math.nan)


def factors_of_blocks(x_OBKI: Tensor, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    """d of each block before its correction, [O, B, blocks, I], for blocks of several."""
    return _each_block(x_OBKI, spec, scale, block_factors).squeeze(3)


def factors_of_elements(
    x_OBKI: Tensor, spec: QuantSpec, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """d of each element before a correction, and the number of its block's element; None if there is one."""
    which: Tensor | None = None
    extent, block_scale = x_OBKI.shape[2], spec.fmt.grid_scale
    assert block_scale is not None
    assert block_scale.each is not None, "several blocks"
    size = min(block_scale.each, extent)

    def of_elements(number: int) -> Tensor:
        def make(x: Tensor, plain: QuantSpec, t: Tensor | None) -> Tensor:
            made = factors(x, plain, t)[number]
            assert made is not None
            return made.expand_as(x)

        each = _each_block(x_OBKI, spec, scale, make)
        assert each.shape[3] == size
        return each.flatten(2, 3)[:, :, :extent]

    if block_scale.others:
        which = of_elements(1)
    return of_elements(0), which


def _each_block(
    x_OBKI: Tensor,
    spec: QuantSpec,
    scale: Tensor | None,
    make: Callable[[Tensor, QuantSpec, Tensor | None], Tensor],
) -> Tensor:
    """`make` of all blocks, [O, B, blocks, ...]: of blocks that are one each, under their t."""
    block_scale = spec.fmt.grid_scale
    assert block_scale is not None
    assert block_scale.each is not None, "several blocks"
    size, t = min(block_scale.each, x_OBKI.shape[2]), scale
    parts, plain = _split(x_OBKI, size), spec
    if block_scale.macro is not Scaling.NONE:
        own = _macro_scales(x_OBKI, spec).unsqueeze(2)
        t = own.expand(-1, -1, parts.shape[2], -1, -1).flatten(1, 2)
    while plain.fmt.grid_scale is not None and plain.fmt.grid_scale.each:
        plain = inner_blocks(plain)
    made: Tensor = torch.unflatten(make(parts.flatten(1, 2), plain, t), 1, parts.shape[1:3])
    return made


def _corrected(
    x_OBKI: Tensor, spec: QuantSpec, scale: Tensor | None, random_OBKI: Tensor | None
) -> Tensor:
    """The images of groups of blocks whose scales share a correction; `scale` may be one of each group.

    A scale that is rounded stochastically has the random number of its block's first element.
    """
    block_scale, (o, b, extent, i) = spec.fmt.grid_scale, x_OBKI.shape
    assert block_scale is not None
    assert block_scale.each is not None, "scales that share a correction"
    plain, size = inner_blocks(spec), min(block_scale.each, extent)
    parts = _split(x_OBKI, size)  # O, B, G blocks, K, I
    blocks, t = parts.flatten(1, 2), scale
    if scale is not None and scale.ndim:
        t = scale.unsqueeze(2).expand(-1, -1, parts.shape[2], -1, -1).flatten(1, 2)
    scales, which = block_scales(blocks, plain, t)
    v = blocks / (scales if t is None else scales * t)
    to_nearest = Rounding.EVEN if spec.rounding is Rounding.STOCHASTIC else spec.rounding
    q = on_elements(v, which, spec.fmt, to_nearest, None)
    c = _correction(v.view_as(parts), q.view_as(parts), spec)
    target = scales.view(o, b, -1, 1, i) * c
    random = None
    if spec.rounding is Rounding.STOCHASTIC:
        assert random_OBKI is not None
        random = _split(random_OBKI, size)[:, :, :, :1]
    own = _on_grid(target, block_scale, random)
    y = q.view_as(parts) * (own if t is None else own * (t.view(o, b, -1, 1, i) if t.ndim else t))
    return y.flatten(2, 3)[:, :, :extent]


def _split(x_OBKI: Tensor, size: int) -> Tensor:
    """x with K divided into groups, [O, B, groups, size, I]; zeros fill the last."""
    missing = -x_OBKI.shape[2] % size
    padded = torch.nn.functional.pad(x_OBKI, (0, 0, 0, missing)) if missing else x_OBKI
    parts: Tensor = torch.unflatten(padded, 2, (-1, size))
    return parts


def _correction(v: Tensor, q: Tensor, spec: QuantSpec) -> Tensor:
    """c of each group, float32, from [O, B, blocks, K, I]."""
    assert spec.fmt.grid_scale is not None
    limit = 2 * max(element.max for element in (spec.fmt.element, *spec.fmt.grid_scale.others))
    # Each term is at most limit^2, so that a sum in units of the step is an integer below 2^52.
    step = 2.0 ** (math.frexp(limit * limit * spec.block)[1] - _SUM_BITS)
    wide = v.double().clamp_(-limit, limit)
    sums = [
        (wide * factor).div_(step).round_().sum(dim=(2, 3), keepdim=True)
        for factor in (wide, q.double())
    ]
    return torch.where(sums[1] == 0, 1.0, sums[0] / sums[1]).float()


def _on_grid(target: Tensor, scale: BlockScale, random: Tensor | None) -> Tensor:
    """Scales on their grid, at random if there are random numbers; NaN stays."""
    if random is None or scale.kind is BlockScaleKind.FP32:
        b = on_scale_grid(target.nan_to_num(0.0), scale, BlockRule.EXACT)
    else:
        grid = scale_grid(scale, target.device).double()
        inside = target.double().clamp(grid[0], grid[-1]).contiguous()
        above = torch.searchsorted(grid, inside, right=True).clamp_(1, grid.numel() - 1)
        low, high = grid[above - 1], grid[above]
        chance = ((inside - low) / (high - low) * 2.0**RANDOM_BITS).floor_()
        b = torch.where(random < chance, high, low).float()
    return b.masked_fill(target.isnan(), math.nan)
