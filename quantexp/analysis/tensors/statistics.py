"""The fidelity of a number format for a tensor: error, underflow, saturation.

Sums are accumulated in float64 over chunks; bf16 is treated as any other dtype. NaN and Inf, and MX blocks with one of
them, are left out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quantexp.analysis.tensors.rows import left_out
from quantexp.analysis.tensors.saturation import largest_representable
from quantexp.formats import quantise, resolve
from quantexp.formats.layout import INPUT_DTYPES
from quantexp.formats.mx import PRE_SCALE
from quantexp.formats.spec import AnySpec
from quantexp.quant.step_state import Draw

#: Elements of a chunk, whose three float64 copies fit in the cache.
_ERROR_CHUNK_ELEMENTS = 1 << 16
_NUM_SUMS = 8


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

    With `pre_scale` the result stands for 3/4 of x, and 4/3 of it is held against x.
    A NaN or Inf makes its whole MX block NaN: such a block is left out. Shares are NaN where
    there is nothing to take them of. Other dtypes than bf16, fp16 and fp32 are judged as fp32.
    Elements that are `padding` (bool, of x's shape) are quantised with the others and not judged.

    Raises:
        ValueError: an unknown format, as `quantise` says it.
    """
    spec = resolve(fmt)
    x = x.detach() if x.dtype in INPUT_DTYPES else x.detach().to(torch.float32)
    q = quantise(x, spec, axis=axis, amax=amax, **(draw or Draw()))
    limit = largest_representable(x, spec, axis, amax)
    if spec.pre_scale:
        q = q.float() / PRE_SCALE
        limit = None if limit is None else limit / PRE_SCALE
    return fidelity(x, left_out(q, padding), limit)


def fidelity(x: Tensor, q: Tensor, limit: Tensor | None) -> Fidelity:
    """The fidelity of `q` for `x`, over elements in which q is not NaN.

    `limit` holds the largest magnitude that each element could become, of a shape that expands to x's; None where
    nothing can saturate. All three are of any floating dtype, x and q of one shape.
    """
    sums = _sums(x, q) if limit is None else _sums(x, q, limit.expand_as(x))
    signal, noise, cross, relative, finite, nonzero, underflowed, saturated = sums.tolist()
    return Fidelity(
        _decibel(signal, noise),
        _share(underflowed, nonzero),
        _share(saturated, finite),
        _share(noise, finite),
        _cosine(signal, noise, cross),
        _share(relative, nonzero),
    )


def _sums(*tensors: Tensor) -> Tensor:
    """`_chunk_sums` over whole tensors: x, q and, if elements can saturate, the limit."""
    parts = [torch.split(t.reshape(-1), _ERROR_CHUNK_ELEMENTS) for t in tensors]
    sums = torch.zeros(_NUM_SUMS, dtype=torch.float64)
    for chunk in zip(*parts, strict=True):
        sums += _chunk_sums(*chunk)
    return sums


def _chunk_sums(x_N: Tensor, q_N: Tensor, limit_N: Tensor | None = None) -> Tensor:
    """Sums over one chunk, e being q - x: x^2, e^2, x e, |e / x|; finite, non-zero, underflowed, saturated elements."""
    wide_N = x_N.double()
    error_N = q_N.double().sub_(wide_N)
    noise = torch.dot(error_N, error_N)
    if not noise.isfinite():
        kept_N = x_N.isfinite() & ~q_N.isnan()
        x_N, q_N, wide_N, error_N = (t[kept_N] for t in (x_N, q_N, wide_N, error_N))
        limit_N = None if limit_N is None else limit_N[kept_N]
        noise = torch.dot(error_N, error_N)
    nonzero, kept_nonzero = int(x_N.count_nonzero()), int(q_N.count_nonzero())
    saturated = 0 if limit_N is None else int((x_N.abs() > limit_N).sum())
    signal, cross = torch.dot(wide_N, wide_N), torch.dot(wide_N, error_N)
    if nonzero < x_N.numel():
        wide_N.masked_fill_(wide_N == 0, math.inf)
    return torch.tensor(
        [
            float(signal),
            float(noise),
            float(cross),
            float(error_N.div_(wide_N).abs_().sum()),
            x_N.numel(),
            nonzero,
            nonzero - kept_nonzero,
            saturated,
        ],
        dtype=torch.float64,
    )


def _decibel(signal: float, noise: float) -> float:
    if signal == 0:
        return math.nan
    if noise == 0:
        return math.inf
    return -math.inf if math.isinf(noise) else 10 * math.log10(signal / noise)


def _cosine(signal: float, noise: float, cross: float) -> float:
    """From q = x + e: sum x q = signal + cross, sum q^2 = signal + 2 cross + noise."""
    energy = signal + 2 * cross + noise
    if not (signal > 0 and energy > 0 and math.isfinite(energy)):
        return math.nan
    return min(1.0, (signal + cross) / math.sqrt(signal * energy))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
