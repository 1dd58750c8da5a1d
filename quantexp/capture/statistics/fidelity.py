"""The fidelity of a number format for a captured tensor (`capture.format`), as numbers on its device, and as JSON.

    signal = sum x^2      noise = sum (x - q)^2      energy = sum q^2      sum x q = (signal + energy - noise) / 2

The format is `capture.format`, or the scheme's own: that of the first product that quantises the tensor. Random
rounding, delayed scales and transforms are left out: the score is that of the tensor as it is.

Where each element is quantised by itself (HiF8, whose one scale follows from the histogram's amax) everything is that
of the 65,536 values, weighted by their counts: nothing depends on the tensor's size. Blocks and formats in Python need
the tensor itself. A block with NaN or Inf is NaN as a whole and left out. The scale of an NVFP4 block is the product of
its own and the tensor's, of which the exponent is counted (floor of log2). A block of zeros counts as 2^-127 in every
format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantexp.capture.names import TensorName
from quantexp.capture.operands import first_quantised
from quantexp.capture.statistics.counts import of_exponents
from quantexp.capture.statistics.errors import (
    beyond_largest,
    cosine,
    decibel,
    error_sums,
    share,
)
from quantexp.capture.statistics.histogram import Histogram
from quantexp.formats import (
    Family,
    Format,
    Hadamard,
    QuantSpec,
    Rounding,
    Scaling,
    TwoLevelScales,
    get_format,
    quantise,
    scales_of,
)
from quantexp.formats.decoding import scale_values
from quantexp.formats.scaling import zero_blocks
from quantexp.quant.multiply import quantise_operand
from quantexp.quant.precision import ModuleId, ModulePrecision, Slots
from quantexp.quant.records import spec_record
from quantexp.quant.scoring import scored_spec

#: signal, noise, energy, elements judged, non-zero, underflowed, saturated (NaN for a format in Python).
NUM_FIDELITY_SUMS = 7
#: The E8M0 bytes: the bias of their exponents, and NaN.
E8M0_BIAS, E8M0_NAN = 127, 255


@dataclass(frozen=True)
class Chosen:
    """A format with its options, and the axis of its blocks."""

    spec: QuantSpec
    axis: int


@cache
def chosen_for(fmt: str | Format, tensor_name: str) -> Chosen:
    """The format with the options of the schemes, along the reduction axis of a captured tensor's first product."""
    spec = scored_spec(fmt, is_gradient=tensor_name.startswith(("grad_", "main_grad")))
    return Chosen(spec, 0 if tensor_name == "value" else -1)


def fidelity(x: Tensor, counted: Histogram, chosen: Chosen) -> Tensor:
    """The sums, then for MX and NVFP4 the number of blocks by biased scale exponent; float64, on x's device."""
    if chosen.spec.fmt.block is None and chosen.spec.fmt.family is not Family.PYTHON:
        return _of_values(x, counted, chosen.spec)
    return _of_tensor(x, chosen)


def _of_values(x: Tensor, counted: Histogram, spec: QuantSpec) -> Tensor:
    if counted.exact:
        values, counts = counted.values, counted.counts.to(torch.float64)
    else:
        values = x.reshape(-1)
        values, counts = values[values.isfinite()].to(torch.float64), None
    if values.numel() == 0:
        return torch.zeros(NUM_FIDELITY_SUMS, dtype=torch.float64, device=x.device)
    present = values if counts is None else torch.where(counts > 0, values, 0.0)
    q = quantise_operand(present.to(x.dtype), spec, -1).to(torch.float64)
    weight = torch.ones_like(present) if counts is None else counts
    nonzero = (weight * (present != 0)).sum()
    # Infinity quantises to the largest value at this tensor's scale.
    limit = quantise_operand(
        torch.cat([present, present.new_tensor([torch.inf])]).to(x.dtype), spec, -1
    )
    beyond = (weight * (present.abs() > limit[-1].to(torch.float64))).sum()
    kept = (weight * ((present != 0) & (q != 0))).sum()
    sums = [present**2, (present - q) ** 2, q**2]
    totals = [(weight * s).sum() for s in sums]
    return torch.stack([*totals, weight.sum(), nonzero, nonzero - kept, beyond])


def _of_tensor(x: Tensor, chosen: Chosen) -> Tensor:
    x = x if x.ndim else x.reshape(1)
    spec, axis = chosen.spec, chosen.axis
    num_exponents = 0 if spec.fmt.block is None else E8M0_NAN + 1
    if x.numel() == 0:
        return torch.zeros(NUM_FIDELITY_SUMS + num_exponents, dtype=torch.float64, device=x.device)
    # The run's random numbers would depend on the iteration.
    q = quantise(x, spec, axis=axis, seed=0) if spec.draws else quantise_operand(x, spec, axis)
    sums = error_sums(x, q, beyond_largest(x, spec, axis))
    signal, noise, cross = sums[:3]
    sums[2] = signal + 2 * cross + noise
    if not num_exponents:
        return sums[:NUM_FIDELITY_SUMS]
    blocks = blocks_by_exponent(x, spec, axis)
    return torch.cat([sums[:NUM_FIDELITY_SUMS], blocks.to(torch.float64)])


def blocks_by_exponent(x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None = None) -> Tensor:
    """The number of blocks for each exponent as in E8M0: biased, 0 for a zero block, 255 for NaN."""
    scales = scales_of(x, spec, axis=axis, amax=amax)
    if isinstance(scales, TwoLevelScales):
        scales = scale_values(scales.block, scales.tensor, spec.fmt)
    if scales.is_floating_point():
        _, exponents = torch.frexp(scales.to(torch.float64))
        biased = (exponents - 1 + E8M0_BIAS).clamp_(0, E8M0_NAN - 1).masked_fill_(scales == 0, 0)
        # The scale of a zero block is the smallest of the format, or 1.
        biased.masked_fill_(zero_blocks(x, spec, axis=axis), 0)
        scales = biased.masked_fill_(scales.isnan(), E8M0_NAN)
    scales = scales.reshape(-1).to(torch.int64)
    # Not `bincount`, which waits for a GPU.
    return scales.new_zeros(E8M0_NAN + 1).scatter_add_(0, scales, torch.ones_like(scales))


def shares_of(numbers: Sequence[float]) -> tuple[float, float]:
    """The shares of saturated values, and of non-zero ones that become zero; 0 where there are none."""
    _, _, _, judged, nonzero, underflowed, beyond = numbers[:NUM_FIDELITY_SUMS]
    return (beyond / judged if beyond > 0 else 0.0), (underflowed / nonzero if nonzero else 0.0)


def fidelity_record(chosen: Chosen, numbers: Sequence[float]) -> dict[str, Any]:
    """The sums and derived values as JSON; missing values are None."""
    signal, noise, energy, judged, nonzero, underflowed, beyond = numbers[:NUM_FIDELITY_SUMS]
    declared = spec_record(chosen.spec)
    values = {
        "signal": signal,
        "noise": noise,
        "sqnr_db": decibel(signal, noise),
        "mse": share(noise, judged),
        "cosine": cosine(signal, energy, (signal + energy - noise) / 2),
        "underflow_share": share(underflowed, nonzero),
        "saturated_share": share(beyond, judged),
    }
    record: dict[str, Any] = {
        **{key: declared[key] for key in ("format", "definition") if key in declared},
        "axis": chosen.axis,
        **{key: declared[key] for key in ("block", "scale_rule", "scaling", "amax_target")},
        **{name: value if math.isfinite(value) else None for name, value in values.items()},
    }
    blocks = [int(count) for count in numbers[NUM_FIDELITY_SUMS:]]
    if blocks:
        record["scale_exponents"] = of_exponents(blocks[:E8M0_NAN], -E8M0_BIAS).json()
        record["nan_blocks"] = blocks[E8M0_NAN]
    return record


class OwnFormats:
    """The formats of the precision map for each tensor, cached until a rule changes the map."""

    def __init__(self) -> None:
        self._scored: dict[tuple[ModuleId, str, str, int], tuple[Slots, Chosen | None]] = {}

    def chosen(self, name: TensorName, precision: ModulePrecision, ndim: int) -> Chosen | None:
        """The format and axis for a tensor of `ndim` dimensions; None if no product quantises it."""
        key = (precision.module, name.operation, name.tensor, ndim)
        slots, chosen = self._scored.get(key, (None, None))
        if slots is not precision.slots:  # new, or changed by a rule
            operand = first_quantised(precision, name.operation, name.tensor)
            chosen = None
            if operand is not None:
                chosen = Chosen(_as_it_is(operand.spec), operand.dim(ndim))
            self._scored[key] = precision.slots, chosen
        return chosen


class Scoring:
    """The format of `capture.format`, if it is set, for all tensors; else the scheme's own, if `of_scheme`."""

    def __init__(
        self, format_name: str | None, formats: Mapping[str, Format] | None, *, of_scheme: bool
    ) -> None:
        """`formats` are those that the scheme declares."""
        self._format = None if format_name is None else get_format(format_name, formats)
        self._own = OwnFormats() if of_scheme else None

    def chosen(self, name: TensorName, precision: ModulePrecision, ndim: int) -> Chosen | None:
        """The format and axis for a tensor of `ndim` dimensions; None for a tensor that is not scored."""
        if self._format is not None:
            return chosen_for(self._format, name.tensor)
        return None if self._own is None else self._own.chosen(name, precision, ndim)


def _as_it_is(spec: QuantSpec) -> QuantSpec:
    """A slot's specification without what depends on a step: random rounding, an amax history, a transform."""
    draws, is_delayed = spec.rounding is Rounding.STOCHASTIC, spec.scaling is Scaling.DELAYED
    return replace(
        spec,
        hadamard=Hadamard.NONE,
        hadamard_block=1,
        rounding=spec.fmt.rounding if draws else spec.rounding,
        scaling=Scaling.CURRENT if is_delayed else spec.scaling,
    )
