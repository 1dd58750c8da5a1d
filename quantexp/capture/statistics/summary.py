"""A tensor's statistics, computed on its device in one pass, and copied to the host as some hundred numbers.

`summarise` leaves a small vector on the tensor's device and, on a GPU, does not synchronise; `Summary.record` copies it
to the host and returns JSON. There is no sampling: for 16-bit dtypes all statistics are exact, for float32 all except
the quantiles, which are those of the elements truncated to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantexp.capture.statistics import native
from quantexp.capture.statistics.counts import of_exponents
from quantexp.capture.statistics.fidelity import (
    NUM_FIDELITY_SUMS,
    Chosen,
    fidelity,
    fidelity_record,
    shares_of,
)
from quantexp.capture.statistics.histogram import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    NUM_EXPONENTS,
    QUANTILES,
    Histogram,
    Pending,
    Together,
    histogram,
    of_patterns,
    pattern_counts,
)
from quantexp.capture.statistics.moments import Totals, central_moments, moments, power_sums
from quantexp.formats.layout import INPUT_DTYPES

#: A float16 up to this rounds to a float16 in every MX format; a larger one may round to 65536, which is infinite.
_LARGEST_ROUNDED = 49152.0
_NUM_SUMS = 8
#: The numbers of a summary before the fidelity.
_NUM_PLAIN = 3 + _NUM_SUMS + len(QUANTILES) + NUM_EXPONENTS
_NO_MOMENTS = ("mean", "std", "min", "max", "abs_max", "skew", "kurtosis")


@dataclass(frozen=True)
class Summary:
    """A tensor's statistics, still on its device."""

    count: int
    _numbers: Tensor | Pending
    chosen: Chosen | None = None
    #: The fidelity of the chosen format, unless the numbers hold it.
    _errors: Tensor | None = None

    @property
    def numbers(self) -> Tensor:
        """NaN, Inf, zeros, power sums, quantiles, magnitudes, and the fidelity if a format was chosen; float64."""
        of_tensor = self._numbers
        numbers = of_tensor.numbers() if isinstance(of_tensor, Pending) else of_tensor
        return numbers if self._errors is None else torch.cat([numbers, self._errors])

    def on_host(self) -> Summary:
        """The same with its numbers in the host's memory."""
        of_tensor = self._numbers
        numbers = of_tensor.on_host() if isinstance(of_tensor, Pending) else of_tensor.cpu()
        errors = None if self._errors is None else self._errors.cpu()
        return Summary(self.count, numbers, self.chosen, errors)

    def record(self) -> dict[str, Any]:
        """The statistics as JSON; missing values are None."""
        numbers = self.on_host().numbers.tolist()
        nan, inf, zeros, *rest = numbers
        sums, rest = rest[:_NUM_SUMS], rest[_NUM_SUMS:]
        quantiles, rest = rest[: len(QUANTILES)], rest[len(QUANTILES) :]
        magnitudes, of_format = rest[:NUM_EXPONENTS], rest[NUM_EXPONENTS:]
        record: dict[str, Any] = {
            "count": self.count,
            "zeros": int(zeros),
            "nonfinite": self.count - int(sums[0]),
            "nan": int(nan),
            "inf": int(inf),
            "zero_share": zeros / self.count if self.count else None,
            **_moments(sums),
            "quantiles": _quantiles(sums[0], quantiles),
            "log2_magnitude": _magnitudes(magnitudes),
        }
        if self.chosen is not None:
            record["fidelity"] = fidelity_record(self.chosen, of_format)
        return record

    def shares(self) -> tuple[float, float] | None:
        """`shares_of` the chosen format, if there is one."""
        if self.chosen is None:
            return None
        return shares_of(self.numbers[_NUM_PLAIN:].tolist())


def all_totals(summaries: Sequence[Summary]) -> list[Totals]:
    """The totals of each summary; those on one device are copied to the host together."""
    if not summaries:
        return []
    sizes = [summary.numbers.numel() for summary in summaries]
    numbers = torch.cat([summary.numbers for summary in summaries]).cpu()
    return [
        _totals(each.tolist(), has_format=summary.chosen is not None)
        for each, summary in zip(torch.split(numbers, sizes), summaries, strict=True)
    ]


def _totals(numbers: list[float], *, has_format: bool) -> Totals:
    sums, bins = numbers[3 : 3 + _NUM_SUMS], numbers[_NUM_PLAIN - NUM_EXPONENTS : _NUM_PLAIN]
    amax = max(abs(sums[6]), abs(sums[7])) if sums[0] else None
    magnitudes = of_exponents([int(count) for count in bins], LOWEST_EXPONENT - 1)
    if not has_format:
        return Totals(amax, magnitudes=magnitudes)
    signal, noise, _, judged, nonzero, underflowed, saturated = numbers[_NUM_PLAIN:][
        :NUM_FIDELITY_SUMS
    ]
    return Totals(amax, signal, noise, judged, nonzero, underflowed, saturated, magnitudes)


def statistics(x: Tensor, chosen: Chosen | None = None) -> dict[str, Any]:
    """`summarise(...).record()`."""
    return summarise(x, chosen).record()


@torch.no_grad()
def summarise(x: Tensor, chosen: Chosen | None = None) -> Summary:
    """The statistics of a tensor of any shape and layout, and the fidelity of a chosen format.

    NaN and Inf are counted and excluded from everything else. Dtypes other than bfloat16, float16 and float32 are
    converted to float32.
    """
    x = as_input(x)
    kernel = kernel_for(x)
    if kernel is not None:
        return summarise_all(kernel, [(x, chosen)])[0]
    if x.device.type == "cpu" or x.dtype == torch.float32:
        return summarise_counted(x, chosen)[0]
    counts_V = pattern_counts(x)
    errors = None if chosen is None else fidelity(x, of_patterns(counts_V, x.dtype), chosen)
    return Summary(x.numel(), _together(x.dtype, x.device).add(counts_V), chosen, errors)


@cache
def _together(dtype: torch.dtype, device: torch.device) -> Together:
    def describe(counts_KV: Tensor) -> Tensor:
        with torch.no_grad():
            return described(counts_KV, of_patterns(counts_KV, dtype))

    return Together(describe)


@torch.no_grad()
def summarise_counted(x: Tensor, chosen: Chosen | None = None) -> tuple[Summary, Histogram]:
    """`summarise`, with the histogram."""
    x = as_input(x)
    kernel, errors = kernel_for(x), None
    if kernel is None:
        counted = histogram(x)
        numbers = described(x, counted)
    else:
        result, counted = native.counted_values(kernel, _look(x, chosen))
        numbers, errors = result.numbers, result.errors
        if chosen is not None and errors is None and x.dtype == torch.float16:
            errors = _errors_in_float32(kernel, x, counted, chosen)
    if chosen is not None:
        errors = fidelity(x, counted, chosen) if errors is None else errors
        numbers = torch.cat([numbers, errors])
    return Summary(x.numel(), numbers, chosen), counted


def described(x: Tensor, counted: Histogram) -> Tensor:
    """The numbers of a `Summary` without a format, from a tensor and its histogram.

    Those of several tensors, [K, ...], from their exact histograms alone.
    """
    zeros = _zeros(x, counted)
    num_nan, num_inf = _nonfinite(x, counted)
    parts = [
        torch.stack([num_nan, num_inf, zeros], -1).to(torch.float64),
        power_sums(x, counted),
        _quantiles_of(counted),
        _exponents_of(counted, zeros),
    ]
    return torch.cat(parts, -1)


def summarise_all(
    kernel: native.Kernels, tensors: Sequence[tuple[Tensor, Chosen | None]]
) -> list[Summary]:
    """`summarise` for tensors with a compiled kernel, in one call that releases the GIL."""
    looks = [_look(x, chosen) for x, chosen in tensors]
    summaries = []
    for (x, chosen), result in zip(tensors, native.counted(kernel, looks), strict=True):
        numbers = result.numbers
        if chosen is not None:
            if result.errors is None:
                summaries.append(summarise_counted(x, chosen)[0])
                continue
            numbers = torch.cat([numbers, result.errors])
        summaries.append(Summary(x.numel(), numbers, chosen))
    return summaries


def as_input(x: Tensor) -> Tensor:
    """The tensor in a supported dtype, without a lazy sign."""
    if x.requires_grad:
        x = x.detach()
    if x.is_neg():
        x = x.resolve_neg()
    return x if x.dtype in INPUT_DTYPES else x.to(torch.float32)


def kernel_for(x: Tensor) -> native.Kernels | None:
    """The compiled code, if it supports the tensor."""
    return native.kernels() if x.device.type == "cpu" and x.numel() < 1 << 32 else None


def _errors_in_float32(
    kernel: native.Kernels, x: Tensor, counted: Histogram, chosen: Chosen
) -> Tensor | None:
    """The MX errors of a float16 tensor, which in float32 are the same; None if the compiled code has none."""
    if bool((counted.values.abs() > _LARGEST_ROUNDED).any()):
        return None
    wide = x.to(torch.float32)
    if not native.takes(wide, chosen.spec):
        return None
    return native.counted(kernel, [_look(wide, chosen)])[0].errors


def _look(x: Tensor, chosen: Chosen | None) -> native.Look:
    return native.Look(x) if chosen is None else native.Look(x, chosen.spec, chosen.axis)


def _zeros(x: Tensor, counted: Histogram) -> Tensor:
    if counted.exact:
        return (counted.counts * (counted.values == 0)).sum(-1)
    return x.numel() - torch.count_nonzero(x)


def _nonfinite(x: Tensor, counted: Histogram) -> tuple[Tensor, Tensor]:
    """The numbers of NaN and Inf; the upper halves of float32 may be ambiguous, so the elements decide then."""
    both = counted.num_nan + counted.num_inf
    if counted.exact or (x.device.type == "cpu" and int(both) == 0):
        return counted.num_nan, counted.num_inf
    num_nan = x.isnan().sum()
    return num_nan, both - num_nan


def _quantiles_of(counted: Histogram) -> Tensor:
    """Quantiles with linear interpolation, as numpy's default; NaN if no element is finite."""
    cumulative = counted.counts.cumsum(-1)
    if cumulative.numel() == 0:
        return torch.full((len(QUANTILES),), torch.nan, dtype=torch.float64)
    n = cumulative.narrow(-1, -1, 1)
    position = _shares(cumulative.device) * (n - 1).clamp_min(0)
    below = position.floor().to(torch.int64)
    last = counted.values.numel() - 1

    def at(rank: Tensor) -> Tensor:
        index = torch.searchsorted(cumulative, torch.minimum(rank, n - 1), right=True)
        return counted.values[index.clamp_max(last)]

    low, high = at(below), at(below + 1)
    return torch.where(n > 0, low + (high - low) * (position - below), torch.nan)


@cache
def _shares(device: torch.device) -> Tensor:
    """`QUANTILES` on a device, copied once: a copy waits for all that a GPU still computes."""
    return torch.tensor(QUANTILES, dtype=torch.float64, device=device)


def _exponents_of(counted: Histogram, zeros: Tensor) -> Tensor:
    """Counts by floor(log2 |x|); the first bin counts smaller elements, the last bin larger ones."""
    _, exponent = torch.frexp(counted.values)
    bin_ = (exponent - 1).clamp(LOWEST_EXPONENT - 1, HIGHEST_EXPONENT + 1) - (LOWEST_EXPONENT - 1)
    bin_ = torch.where(counted.values == 0, 0, bin_).to(torch.int64)
    counts = counted.counts.to(torch.float64)
    bins = counts.new_zeros(*counts.shape[:-1], NUM_EXPONENTS)
    bins.index_add_(-1, bin_, counts)
    bins.select(-1, 0).sub_(zeros)
    return bins


def _moments(sums: Sequence[float]) -> dict[str, float | None]:
    if not sums[0]:
        return dict.fromkeys(_NO_MOMENTS)
    return moments(*central_moments(list(sums)), *sums[6:8])


def _quantiles(count: float, quantiles: Sequence[float]) -> dict[str, float] | None:
    if not count:
        return None
    return {str(share): value for share, value in zip(QUANTILES, quantiles, strict=True)}


def _magnitudes(bins: Sequence[float]) -> dict[str, Any]:
    """The bins from the first to the last exponent that occurs, and the counts outside the bins."""
    counts = [int(count) for count in bins]
    inside = of_exponents(counts[1:-1], LOWEST_EXPONENT)
    return {"below": counts[0], "above": counts[-1], **inside.json()}
