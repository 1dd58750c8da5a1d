"""The fidelity of a number format for a tensor: sums for SQNR and cosine, shares of elements, block scales.

    signal = sum x^2      noise = sum (x - q)^2      energy = sum q^2      sum x q = (signal + energy - noise) / 2

Where each element is quantised by itself (HiF8, whose one scale follows from the histogram's amax) everything is that
of the 65,536 values, weighted by their counts: nothing depends on the tensor's size. Blocks need the tensor itself, or,
of MX, counts by block scale (`quantexp.capture.statistics.by_scale`). A block with NaN or Inf is NaN as a whole and
left out. The scale of an NVFP4 block is the product of its own and the tensor's, of which the exponent is counted
(floor of log2). Sums over a tensor's elements are of float32 squares in float64 chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantexp.capture.statistics.by_scale import ByScale, by_scale, can_be_counted
from quantexp.capture.statistics.histogram import Histogram
from quantexp.formats import QuantSpec, ScaleRule, TwoLevelScales, scales_of
from quantexp.formats import saturated as saturated_of
from quantexp.formats.decoding import scale_values
from quantexp.quant.operand import quantise_operand
from quantexp.quant.precision import spec_record
from quantexp.quant.scoring import scored_spec

#: signal, noise, energy, elements judged, non-zero, underflowed, saturated.
_NUM_SUMS = 7
_E8M0_BIAS, _E8M0_NAN = 127, 255
_CHUNK = 1 << 16
_NEVER_SATURATES = (ScaleRule.RCEIL, ScaleRule.CEIL)


@dataclass(frozen=True)
class Chosen:
    """A format with its options, and the axis of its blocks."""

    spec: QuantSpec
    axis: int


@cache
def chosen_for(format_name: str, tensor_name: str) -> Chosen:
    """The format with the options of the schemes, along the reduction axis of a captured tensor's first product."""
    spec = scored_spec(format_name, is_gradient=tensor_name.startswith(("grad_", "main_grad")))
    return Chosen(spec, 0 if tensor_name == "value" else -1)


def fidelity(x: Tensor, counted: Histogram, chosen: Chosen) -> Tensor:
    """The sums, then for MX and NVFP4 the number of blocks by biased scale exponent; float64, on x's device."""
    if chosen.spec.fmt.block is None:
        return _of_values(x, counted, chosen.spec)
    if can_be_counted(x, chosen.spec, chosen.axis):
        pairs = by_scale(x, chosen.spec, chosen.axis)
        zeros = (counted.counts * (counted.values == 0)).sum()
        return _of_pairs(pairs, x.numel() - zeros - pairs.num_left_out, chosen.spec)
    return _of_blocks(x, chosen)


def _of_values(x: Tensor, counted: Histogram, spec: QuantSpec) -> Tensor:
    if counted.exact:
        values, counts = counted.values, counted.counts.to(torch.float64)
    else:
        values = x.reshape(-1)
        values, counts = values[values.isfinite()].to(torch.float64), None
    if values.numel() == 0:
        return torch.zeros(_NUM_SUMS, dtype=torch.float64, device=x.device)
    present = values if counts is None else torch.where(counts > 0, values, 0.0)
    q = quantise_operand(present.to(x.dtype), spec, -1).to(torch.float64)
    weight = torch.ones_like(present) if counts is None else counts
    nonzero = (weight * (present != 0)).sum()
    # Infinity quantises to the largest value at this tensor's scale.
    limit = quantise_operand(
        torch.cat([present, present.new_tensor([torch.inf])]).to(x.dtype), spec, -1
    )
    saturated = (weight * (present.abs() > limit[-1].to(torch.float64))).sum()
    kept = (weight * (q != 0)).sum()
    sums = [present**2, (present - q) ** 2, q**2]
    totals = [(weight * s).sum() for s in sums]
    return torch.stack([*totals, weight.sum(), nonzero, nonzero - kept, saturated])


def _of_pairs(pairs: ByScale, nonzero: Tensor, spec: QuantSpec) -> Tensor:
    counts = pairs.counts_U.to(torch.float64)
    x, q = pairs.magnitude_U.to(torch.float64), pairs.held_U.to(torch.float64)
    kept = torch.dot(counts, (q != 0).to(torch.float64))
    energies = [torch.dot(counts, v * v) for v in (x, x - q, q)]
    saturated = counts.new_zeros(())
    if spec.scale_rule not in _NEVER_SATURATES:
        limit = _limit(spec, pairs.scale_U)
        saturated = torch.dot(counts, (x > limit).to(torch.float64))
    sums = torch.stack([*energies, counts.sum(), nonzero, nonzero - kept, saturated])
    return torch.cat([sums, pairs.blocks_S.to(torch.float64)])


def _limit(spec: QuantSpec, scales: Tensor) -> Tensor:
    """The largest value at each scale byte."""
    largest = torch.full_like(scales, spec.fmt.element.max, dtype=torch.float32)
    return torch.ldexp(largest, scales.to(torch.int32) - _E8M0_BIAS)


def _of_blocks(x: Tensor, chosen: Chosen) -> Tensor:
    x = x if x.ndim else x.reshape(1)
    spec = chosen.spec
    if x.numel() == 0:
        return torch.zeros(_NUM_SUMS + _E8M0_NAN + 1, dtype=torch.float64, device=x.device)
    q = quantise_operand(x, spec, chosen.axis)
    beyond = saturated_of(x, spec, axis=chosen.axis).sum()
    sums = _sums(x.reshape(-1), q.reshape(-1))
    bytes_ = _scale_bytes(x, chosen).reshape(-1).to(torch.int64)
    histogram = torch.bincount(bytes_, minlength=_E8M0_NAN + 1)
    return torch.cat([sums, beyond[None].to(torch.float64), histogram.to(torch.float64)])


def _scale_bytes(x: Tensor, chosen: Chosen) -> Tensor:
    """The exponent of each block's scale as in E8M0: biased, 0 for a zero block, 255 for NaN."""
    scales = scales_of(x, chosen.spec, axis=chosen.axis)
    if not isinstance(scales, TwoLevelScales):
        return scales
    values = scale_values(scales.block, scales.tensor, chosen.spec.fmt)
    _, exponents = torch.frexp(values.to(torch.float64))
    bytes_ = (exponents - 1 + _E8M0_BIAS).clamp_(0, _E8M0_NAN - 1)
    bytes_ = bytes_.masked_fill_(values == 0, 0)
    return bytes_.masked_fill_(values.isnan(), _E8M0_NAN)


def _sums(x_N: Tensor, q_N: Tensor) -> Tensor:
    """For elements outside NaN blocks: signal, noise, energy, their number, and the non-zero and underflowed ones."""
    sums = torch.zeros(6, dtype=torch.float64, device=x_N.device)
    for x_part, q_part in zip(torch.split(x_N, _CHUNK), torch.split(q_N, _CHUNK), strict=True):
        x32, q32 = x_part.to(torch.float32), q_part.to(torch.float32)
        kept = x_part.numel() - q32.isnan().sum()
        if x_N.device.type != "cpu" or int(kept) < x_part.numel():
            left = q32.isnan()
            x32, q32 = x32.masked_fill(left, 0.0), q32.masked_fill(left, 0.0)
        nonzero = torch.count_nonzero(x32)
        energies = [torch.dot(v, v) for v in (x32, x32 - q32, q32)]
        sums += torch.stack([*energies, kept, nonzero, nonzero - torch.count_nonzero(q32)])
    return sums


def fidelity_record(chosen: Chosen, numbers: Sequence[float]) -> dict[str, Any]:
    """The sums and derived values as JSON; missing values are None."""
    from quantexp.capture.statistics.histogram import trimmed

    signal, noise, energy, judged, nonzero, underflowed, saturated = numbers[:_NUM_SUMS]
    declared = spec_record(chosen.spec)
    record: dict[str, Any] = {
        "format": declared["format"],
        "axis": chosen.axis,
        **{key: declared[key] for key in ("block", "scale_rule", "scaling", "amax_target")},
        "signal": _finite(signal),
        "noise": _finite(noise),
        "sqnr_db": _decibel(signal, noise),
        "mse": _finite(noise / judged) if judged else None,
        "cosine": _cosine(signal, noise, energy),
        "underflow_share": underflowed / nonzero if nonzero else None,
        "saturated_share": saturated / judged if judged else None,
    }
    bytes_ = [int(count) for count in numbers[_NUM_SUMS:]]
    if bytes_:
        record["scale_exponents"] = trimmed(bytes_[:_E8M0_NAN], -_E8M0_BIAS)
        record["nan_blocks"] = bytes_[_E8M0_NAN]
    return record


def _decibel(signal: float, noise: float) -> float | None:
    if not (signal > 0 and noise > 0 and math.isfinite(noise)):
        return None
    return 10 * math.log10(signal / noise)


def _cosine(signal: float, noise: float, energy: float) -> float | None:
    if not (signal > 0 and energy > 0 and math.isfinite(energy)):
        return None
    return (signal + energy - noise) / 2 / math.sqrt(signal * energy)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
