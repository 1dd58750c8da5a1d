"""The arithmetic of the families MX, NVFP4, FP8 and HiFloat8 in torch, on any device: the reference of all kernels.

MX (OCP MX v1.0, section 6.3): for a block x, in float32, with every step exact except the rounding:

    s = rule(max |x|) (see `rounding`)      q = clamp(round(|x| 2^-s), max)      y = sign(x) q 2^s

NVFP4 (arXiv 2509.25149): for a tensor scale t and a block x, in float32, with each operation rounded once:

    b = e4m3(max |x| / 6 / t)      d = b t      q = round(clamp(|x| / d, 6))      y = sign(x) q d

b is rounded to nearest even, between the smallest and the largest positive value of E4M3, 2^-9 and 448: a zero block
also has 2^-9. If t is a power of two, everything except the two roundings to a grid is exact.

In both, a NaN or an Inf anywhere in a block makes the whole block NaN, and signed zeros keep their sign. With
`pre_scale` (arXiv 2502.20586), 3/4 of each scaled element is rounded, or another part p (that product is also rounded
to float32), under the scale of x: y then represents p x.

FP8 and HiFloat8: y = e(x s) / s, with e the element's rounding and s the scale of the tensor:

    current  the largest power of two with amax s <= target
    exact    target / amax, rounded to float32
    delayed  as current, with the amax of earlier tensors

s is clamped to [2^-126, 2^127], the normal powers of two of float32. NVFP4 has the inverse t, which multiplies codes
and block scales, as its hardware stores it:

    current  the smallest power of two with amax / t <= target
    exact    amax / target, rounded to float32

t is clamped to [2^-117, 2^127], so that its product with every block scale is a normal number. The family `grid` of
declared formats is scaled as NVFP4, with the limit that its own block scales give. The scale is 1 if amax is 0, if no
element is finite, or if amax itself is not a positive finite number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantexp.formats.kernels import exact, is_torch_alone, kernel_for_amax
from quantexp.formats.layout import Scratch, chunk_limit, chunks, in_memory_order, memory_order
from quantexp.formats.operators import operator
from quantexp.formats.rounding import (
    EXPONENT_MASK,
    as_bits,
    can_saturate,
    fp8_values,
    from_bits,
    hif8_values,
    inverse_power_of_two,
    power_of_two,
    round_element,
    round_magnitudes,
    scale_field,
)
from quantexp.formats.spec import QuantSpec, check_amax
from quantexp.formats.torch_internals import check_input, constant, is_plain
from quantexp.formats.types import Element, Family, Format, Scaling

#: Scalings whose scale is a power of two.
POWERS_OF_TWO = frozenset({Scaling.CURRENT, Scaling.DELAYED})

_MIN_SCALE = 2.0**-126
_MAX_SCALE = 2.0**127
_FLOAT64_MANTISSA_BITS = 52


@exact
def tensor_scale(x: Tensor, spec: QuantSpec, amax: Tensor | None) -> Tensor | None:
    """The scale as a 0-dim float32 tensor on x's device; None if the specification has none.

    For a sharded tensor, pass the amax of all shards: `finite_amax`, MAX-reduced.

    Raises:
        ValueError: as `check_amax`.
    """
    check_amax(spec, amax is not None)
    if spec.scaling is Scaling.NONE:
        return None
    if amax is None:
        amax = _finite_amax(x)
    inverse = spec.fmt.family in (Family.NV, Family.GRID)
    if x.device.type == amax.device.type == "cpu" and not is_torch_alone():
        value = _scale_of(float(amax), spec, inverse)
        return torch.tensor(value, dtype=torch.float32, device="cpu")
    return scale_of_amax(amax.to(device=x.device, dtype=torch.float64), spec, inverse=inverse)


def scale_of_amax(amax: Tensor, spec: QuantSpec, *, inverse: bool) -> Tensor:
    """The scale for each amax, float64, in float32; 1 where it is not finite, or 0."""
    if spec.scaling in POWERS_OF_TWO:
        scale = _power_of_two_below(spec.amax_target, amax)
        scale = 1 / scale if inverse else scale
    else:  # a tensor, because torch replaces division by or of a Python number with a reciprocal
        target = torch.full_like(amax, spec.amax_target)
        scale = amax / target if inverse else target / amax
    usable = (amax > 0) & amax.isfinite()
    smallest = smallest_scale(spec.fmt)
    return torch.where(usable, scale, 1.0).clamp_(smallest, _MAX_SCALE).to(torch.float32)


def _scale_of(amax: float, spec: QuantSpec, inverse: bool) -> float:
    """The same of a number: without operators of torch, which take longer than to quantise a small tensor."""
    if not (amax > 0 and math.isfinite(amax)):
        return 1.0
    if spec.scaling in POWERS_OF_TWO:
        (mantissa, exponent), (most, power) = math.frexp(amax), math.frexp(spec.amax_target)
        scale = 2.0 ** min(max(power - exponent - (mantissa > most), -126), 127)
        scale = 1 / scale if inverse else scale
    else:
        scale = amax / spec.amax_target if inverse else spec.amax_target / amax
    return min(max(scale, smallest_scale(spec.fmt)), _MAX_SCALE)


def smallest_scale(fmt: Format) -> float:
    """The smallest scale of a tensor: times the smallest block scale, if there is one, it is a normal number."""
    element = fmt.block_scale or (fmt.grid_scale.element if fmt.grid_scale else None)
    if element is None:
        return _MIN_SCALE
    return _MIN_SCALE / 2.0 ** (element.emin - element.mantissa_bits)


def _power_of_two_below(target: float, amax: Tensor) -> Tensor:
    """The largest power of two s with amax * s <= target, in float64, clamped to the allowed range.

    Shifting the difference of the bits of two positive floats down to the exponent field gives the difference of their
    exponents, minus one if amax has the larger mantissa. No float32 is subnormal in float64.
    """
    target_bits = torch.full_like(amax, target).view(torch.int64)  # no copy that waits for a GPU
    exponent = (target_bits - amax.view(torch.int64)) >> _FLOAT64_MANTISSA_BITS
    biased = exponent.clamp_(-126, 127) + 1023
    return (biased << _FLOAT64_MANTISSA_BITS).view(torch.float64)


def finite_amax(x: Tensor) -> Tensor:
    """The largest magnitude among x's finite elements, 0-dim float32; 0 if there are none. It has no derivative.

    Raises:
        TypeError: x is not a dense tensor of one of the dtypes that can be quantised.
    """
    check_input(x)
    if is_plain(x):
        return _finite_amax(constant(x))
    amax: Tensor = _operator(x.detach())
    return amax


@exact
def _finite_amax(x: Tensor) -> Tensor:
    kernel = kernel_for_amax(x)
    if kernel is not None:
        return kernel.finite_amax(in_memory_order(x, memory_order(x)))
    bits_dtype = torch.int32 if x.dtype == torch.float32 else torch.int16
    bits_N = in_memory_order(x, memory_order(x)).view(-1).view(bits_dtype)
    bound = torch.tensor(torch.inf, dtype=x.dtype, device="cpu").view(bits_dtype).item()
    limit = chunk_limit(x.device)
    largest = [
        _largest_below(bits_N[start : start + limit], int(bound))
        for start in range(0, bits_N.numel(), limit)
    ]
    if not largest:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return torch.stack(largest).amax().view(x.dtype).to(torch.float32)


def _shape_of_operator(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


_operator = operator("finite_amax", "(Tensor x) -> Tensor", _finite_amax, _shape_of_operator)


def _largest_below(bits_N: Tensor, bound: int) -> Tensor:
    """The largest magnitude bits below the bound; 0 if there are none.

    Adding the distance from the bound to the top of the integers makes those at or above the bound negative.
    """
    info = torch.iinfo(bits_N.dtype)
    to_the_top = info.max - bound + 1
    magnitude_N = bits_N.bitwise_and(info.max).add_(to_the_top)
    return magnitude_N.amax().clamp_min_(to_the_top).sub_(to_the_top)


def quantise_mx(
    x_ONI: Tensor, y_ONI: Tensor, spec: QuantSpec, random_ONI: Tensor | None = None
) -> None:
    """Write the quantised x to y, which may be x itself.

    `random_ONI` is for stochastic rounding, see `rounding`.
    """
    limit = chunk_limit(x_ONI.device)
    scratch = Scratch(scratch_size(x_ONI, spec.block, limit), x_ONI.device)
    o, n, i = x_ONI.shape
    for chunk in chunks((o, n, i), spec.block, limit):
        x_OBKI = chunk.elements(x_ONI)
        random = None if random_ONI is None else chunk.elements(random_ONI)
        q, sign, field = mx_magnitudes(x_OBKI, spec, random, scratch)
        q.mul_(power_of_two(field))
        write_signed(q, sign, chunk.elements(y_ONI))


def scratch_size(x_ONI: Tensor, block: int, limit: int) -> int:
    """The largest number of elements of a chunk."""
    return min(x_ONI.numel(), max(limit, block))


def mx_magnitudes(
    x_OBKI: Tensor, spec: QuantSpec, random_OBKI: Tensor | None, scratch: Scratch
) -> tuple[Tensor, Tensor, Tensor]:
    """|x| 2^-s on the element's grid, x in float32 for its sign, and the scales' exponent fields.

    The first is a scratch buffer, the second another, or x itself; their content in a NaN block is undefined. The
    fields have extent 1 along K.
    """
    element = spec.fmt.element
    x32, q, magic = scratch.of_shape(x_OBKI.shape)
    x32 = x_OBKI if x_OBKI.dtype == torch.float32 else x32.copy_(x_OBKI)
    amax_bits = block_amax_bits(x32, q)
    field = scale_field(amax_bits, element, spec.scale_rule)
    q.mul_(inverse_power_of_two(field))
    if spec.is_pre_scaled:
        q.mul_(spec.pre_scale)
    round_element(q, element, spec.rounding, random_OBKI, magic)
    if can_saturate(spec.scale_rule):
        q.clamp_max_(element.max)
    return q, x32, field


def block_amax_bits(x32_OBKI: Tensor, magnitude_OBKI: Tensor) -> Tensor:
    """The bits of each block's amax, with extent 1 along K; |x| is left in `magnitude`.

    The integers order magnitudes as the floats do, with NaN above Inf above all finite values.
    """
    torch.abs(x32_OBKI, out=magnitude_OBKI)
    return as_bits(magnitude_OBKI).amax(dim=2, keepdim=True)


def write_signed(magnitude: Tensor, signed: Tensor, y: Tensor) -> None:
    """Write `magnitude`, which is overwritten, to y with the signs of `signed`, which may be y itself."""
    if y.dtype == torch.float32:
        torch.copysign(magnitude, signed, out=y)
    else:
        y.copy_(magnitude.copysign_(signed))


def quantise_nv(
    x_ONI: Tensor,
    y_ONI: Tensor,
    spec: QuantSpec,
    scale: Tensor | None,
    random_ONI: Tensor | None = None,
) -> None:
    """Write the quantised x to y, which may be x itself; `scale` is t, None means 1.

    `random_ONI` is for stochastic rounding, see `rounding`.
    """
    limit = chunk_limit(x_ONI.device)
    scratch = Scratch(scratch_size(x_ONI, spec.block, limit), x_ONI.device)
    o, n, i = x_ONI.shape
    for chunk in chunks((o, n, i), spec.block, limit):
        random = None if random_ONI is None else chunk.elements(random_ONI)
        q, signed, block_scale = nv_magnitudes(chunk.elements(x_ONI), spec, scale, random, scratch)
        q.mul_(total_scale(block_scale, scale))
        write_signed(q, signed, chunk.elements(y_ONI))


def nv_magnitudes(
    x_OBKI: Tensor,
    spec: QuantSpec,
    scale: Tensor | None,
    random_OBKI: Tensor | None,
    scratch: Scratch,
) -> tuple[Tensor, Tensor, Tensor]:
    """|x| / d on the element's grid, x in float32 for its sign, and the block scales b.

    The first is a scratch buffer, the second another, or x itself. b is float32, with extent 1 along K; for a block
    with NaN or Inf, b and the first are NaN.
    """
    element = spec.fmt.element
    x32, q, magic = scratch.of_shape(x_OBKI.shape)
    x32 = x_OBKI if x_OBKI.dtype == torch.float32 else x32.copy_(x_OBKI)
    amax_bits = block_amax_bits(x32, q)
    block_scale = known_scales(amax_bits, spec.fmt, scale)
    q.div_(total_scale(block_scale, scale))
    if spec.is_pre_scaled:
        q.mul_(spec.pre_scale)
    round_element(q.clamp_max_(element.max), element, spec.rounding, random_OBKI, magic)
    return q, x32, block_scale


def known_scales(amax_bits: Tensor, fmt: Format, scale: Tensor | None) -> Tensor:
    """b of each block; NaN for a block with NaN or Inf."""
    scales = block_scales(amax_bits, fmt, scale)
    return scales.masked_fill_(amax_bits >= EXPONENT_MASK, math.nan)


def block_scales(amax_bits: Tensor, fmt: Format, scale: Tensor | None) -> Tensor:
    """b of each block, float32, from the bits of its amax; undefined if that is NaN or Inf.

    The largest value is a tensor because CUDA multiplies by the reciprocal of a Python number, which rounds twice.
    """
    assert fmt.block_scale is not None
    largest = torch.full((), fmt.element.max, dtype=torch.float32, device=amax_bits.device)
    ratio = from_bits(amax_bits) / largest
    return nearest_scale(ratio if scale is None else ratio.div_(scale), fmt.block_scale)


def nearest_scale(ratio: Tensor, element: Element) -> Tensor:
    """Positive numbers (float32, overwritten), rounded to the positive finite values of an element."""
    smallest = 2.0 ** (element.emin - element.mantissa_bits)
    ratio.clamp_(smallest, element.max)
    round_magnitudes(ratio, element, torch.empty_like(ratio))
    return ratio


def total_scale(block_scale: Tensor, scale: Tensor | None) -> Tensor:
    """The divisor of |x| and factor of the codes: b t."""
    return block_scale if scale is None else block_scale * scale


#: The families of such formats, each with the function that computes e(x s).
SCALED_VALUES = {Family.HIF8: hif8_values, Family.FP8: fp8_values}


def quantise_flat(
    x_N: Tensor,
    y_N: Tensor,
    spec: QuantSpec,
    scale: Tensor | None,
    random_N: Tensor | None = None,
) -> None:
    """Write e(x s) / s to y, which may be x itself; s is a 0-dim float32 tensor, None means 1.

    `random_N` is for stochastic rounding, see `rounding`.
    """
    scaled_values = SCALED_VALUES[spec.fmt.family]
    limit = chunk_limit(x_N.device)
    scratch = Scratch(min(x_N.numel(), limit), x_N.device)
    for start in range(0, x_N.numel(), limit):
        chunk = slice(start, start + limit)
        random = None if random_N is None else random_N[chunk]
        q = scaled_values(x_N[chunk], spec, scale, random, scratch)
        if scale is not None:
            q.div_(scale)
        y_N[chunk].copy_(q)
