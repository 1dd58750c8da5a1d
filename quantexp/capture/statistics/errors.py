"""The fidelity of a number format for a tensor: error, underflow, saturation, as sums and as the derived measures.

Sums are accumulated in float64 over chunks, on the tensor's device; bf16 is treated as any other dtype. NaN and Inf,
and blocks with one of them, are left out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quantexp.formats import Family, QuantSpec, finite_amax, quantise, resolve, saturated
from quantexp.formats.layout import INPUT_DTYPES
from quantexp.formats.spec import AnySpec
from quantexp.quant.step_state import Draw

#: Elements of a chunk: on a CPU, whose cache holds their three float64 copies, and elsewhere, where a small chunk would
#: take longer to launch than to compute.
_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 22
#: The numbers of `error_sums`, and the place of the saturated elements.
_NUM_SUMS, _SATURATED = 8, 6


class Fidelity(NamedTuple):
    """The fidelity of a quantised tensor."""

    #: 10 log10(sum x^2 / sum (x - q)^2); inf if nothing changed, -inf if a finite value became
    #: infinite, NaN if there is no finite non-zero element.
    sqnr_db: float
    #: Fraction of the non-zero elements that became zero.
    underflow_share: float
    #: Fraction of the finite elements beyond the largest value at their block's scale.
    saturated_share: float
    #: Mean of (x - q)^2, in the tensor's unit squared; NaN without finite elements.
    mse: float = math.nan
    #: sum x q / sqrt(sum x^2 sum q^2); NaN if x or q has no non-zero element, or if q is infinite.
    cosine: float = math.nan
    #: Mean of |x - q| / |x| over the non-zero elements; 1 for an element that became zero.
    relative_error: float = math.nan


def quantisation_error(
    x: Tensor,
    fmt: AnySpec,
    axis: int = -1,
    *,
    amax: Tensor | None = None,
    draw: Draw | None = None,
    padding: Tensor | None = None,
) -> Fidelity:
    """The fidelity of `quantise(x, fmt, axis=axis, amax=amax, **draw)` over elements whose result is not NaN.

    With `pre_scale` the result stands for a part of x, and is divided by that part. A NaN or Inf makes its whole MX
    block NaN: such a block is left out. Shares are NaN where there is nothing to take them of. Dtypes other than bf16,
    fp16 and fp32 are judged as fp32. Elements that are `padding` (bool, of x's shape) are quantised with the others and
    not judged.

    Raises:
        ValueError: an unknown format, as for `quantise`.
    """
    spec = resolve(fmt)
    x = x.detach() if x.dtype in INPUT_DTYPES else x.detach().to(torch.float32)
    q = quantise(x, spec, axis=axis, amax=amax, **(draw or Draw()))
    if spec.is_pre_scaled:
        q = q.float() / spec.pre_scale
    return fidelity(x, q, beyond_largest(x, spec, axis, amax), padding)


def beyond_largest(
    x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None = None
) -> Tensor | None:
    """Whether each element lies beyond the largest value at its scale, bool of x's shape.

    None for a format in Python, whose largest value is not known.

    For blocks that is `saturated`. A tensor's scale s need not be a power of two: x is compared with the rounded
    max / s, where `saturated` compares the rounded x s, so that the two may differ for the element that decides s.
    """
    if spec.fmt.family is Family.PYTHON:
        return None
    if spec.fmt.family not in (Family.HIF8, Family.FP8):
        return saturated(x, spec, axis=axis, amax=amax)
    if spec.is_scaled and amax is None:
        amax = finite_amax(x)
    saturating = replace(spec, saturate=True, rounding=spec.fmt.rounding)
    infinity = torch.full((), math.inf, dtype=torch.float32, device=x.device)
    return x.abs() > quantise(infinity, saturating, amax=amax)


def fidelity(
    x: Tensor, q: Tensor, beyond: Tensor | None, padding: Tensor | None = None
) -> Fidelity:
    """The fidelity of `q` for `x`, over elements in which q is not NaN and that are no padding.

    `beyond` marks the saturated elements; without it their share is NaN. x and q are of any floating dtype, `beyond`
    and `padding` bool; all of one shape.
    """
    q = q if padding is None else q.masked_fill(padding, torch.nan)
    sums = error_sums(x, q, beyond).tolist()
    signal, noise, cross, judged, nonzero, underflowed, num_beyond, relative = sums
    return Fidelity(
        decibel(signal, noise),
        share(underflowed, nonzero),
        share(num_beyond, judged),
        share(noise, judged),
        cosine(signal, signal + 2 * cross + noise, signal + cross),
        share(relative, nonzero),
    )


def error_sums(x: Tensor, q: Tensor, beyond: Tensor | None) -> Tensor:
    """Sums over the elements in which x is finite and q not NaN, e being q - x; float64, on x's device.

    [x^2, e^2, x e, elements, non-zero elements, underflowed, saturated (NaN without `beyond`), |e / x|]
    """
    is_known, beyond = beyond is not None, q.isnan() if beyond is None else beyond
    chunk = _CHUNK if x.device.type == "cpu" else _DEVICE_CHUNK
    parts = [torch.split(t.reshape(-1), chunk) for t in (x, q, beyond)]
    sums = torch.zeros(_NUM_SUMS, dtype=torch.float64, device=x.device)
    for part in zip(*parts, strict=True):
        sums += _chunk_sums(*part)
    if not is_known:
        sums[_SATURATED] = math.nan
    return sums


def _chunk_sums(x_N: Tensor, q_N: Tensor, beyond_N: Tensor) -> Tensor:
    """`error_sums` over one chunk."""
    can_skip = _can_skip(x_N)
    wide_N = x_N.double()
    error_N = q_N.double().sub_(wide_N)
    noise = torch.dot(error_N, error_N)
    judged = torch.full_like(noise, x_N.numel())
    if not can_skip or not noise.isfinite():
        kept_N = x_N.isfinite() & ~q_N.isnan()
        judged = kept_N.sum()
        x_N, q_N, wide_N, error_N, beyond_N = (
            t[kept_N] if can_skip else t.masked_fill(~kept_N, 0)
            for t in (x_N, q_N, wide_N, error_N, beyond_N)
        )
        noise = torch.dot(error_N, error_N)
    nonzero, kept = torch.count_nonzero(x_N), torch.count_nonzero(q_N)
    signal, cross = torch.dot(wide_N, wide_N), torch.dot(wide_N, error_N)
    if not can_skip or nonzero < x_N.numel():
        # A format without a zero moves zeros, too.
        kept = torch.count_nonzero((x_N != 0).logical_and_(q_N != 0))
        wide_N = wide_N.masked_fill(wide_N == 0, math.inf)
    relative = error_N.div_(wide_N).abs_().sum()
    sums = [signal, noise, cross, judged, nonzero, nonzero - kept, beyond_N.sum(), relative]
    return torch.stack(sums)


def _can_skip(x: Tensor) -> bool:
    """Whether a test costs less than the computation that it may skip; on a GPU it synchronises."""
    return x.device.type == "cpu"


def decibel(signal: float, noise: float) -> float:
    """The signal-to-noise ratio: inf without noise, -inf with infinite noise, NaN without a signal."""
    if signal == 0:
        return math.nan
    if noise == 0:
        return math.inf
    return -math.inf if math.isinf(noise) else 10 * math.log10(signal / noise)


def cosine(signal: float, energy: float, product: float) -> float:
    """The cosine from sum x^2, sum q^2 and sum x q, at most 1; NaN without a signal, or of an infinite or zero q."""
    if not (signal > 0 and energy > 0 and math.isfinite(energy)):
        return math.nan
    return min(1.0, product / math.sqrt(signal * energy))


def share(part: float, whole: float) -> float:
    """part / whole; NaN of nothing."""
    return part / whole if whole else math.nan
