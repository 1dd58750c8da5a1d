"""The scale of a tensor, from its amax.

For HiF8 and FP8 the scale s multiplies the tensor before rounding and divides it afterwards:

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

import torch
from torch import Tensor

from quantexp.formats.exact_mode import exact
from quantexp.formats.kernels.choice import kernel_for_amax
from quantexp.formats.layout import chunk_limit, in_memory_order, memory_order
from quantexp.formats.operators import operator
from quantexp.formats.plain import check_input, constant, is_plain
from quantexp.formats.spec import QuantSpec, check_amax
from quantexp.formats.types import Family, Format, Scaling

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
    amax = amax.to(device=x.device, dtype=torch.float64)
    inverse = spec.fmt.family in (Family.NV, Family.GRID)
    if spec.scaling in POWERS_OF_TWO:
        scale = _power_of_two_below(spec.amax_target, amax)
        scale = 1 / scale if inverse else scale
    else:  # a tensor, because torch replaces division by or of a Python number with a reciprocal
        target = torch.full_like(amax, spec.amax_target)
        scale = amax / target if inverse else target / amax
    usable = (amax > 0) & amax.isfinite()
    smallest = smallest_scale(spec.fmt)
    return torch.where(usable, scale, 1.0).clamp_(smallest, _MAX_SCALE).to(torch.float32)


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
