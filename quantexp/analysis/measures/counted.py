"""The values of one captured tensor, their counts, and the derived statistics.

Of bfloat16 and float16 all numbers are exact: the tensor has at most 65,536 different values, and they are counted. Of
float32 (and of any other dtype, taken as float32) moments, extremes and counts are exact, and quantiles too, by a
second look at the few elements whose upper sixteen bits are those of a quantile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantexp.analysis.tensors.largest import largest_tokens
from quantexp.capture.operands import SCALE
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics.histogram import QUANTILES, Histogram
from quantexp.capture.statistics.summary import summarise_counted
from quantexp.errors import CaptureError
from quantexp.formats.decoding import scale_values
from quantexp.formats.definitions.files import format_of_record
from quantexp.formats.layout import INPUT_DTYPES, in_memory_order, memory_order

#: Elements of a chunk, which bounds the float64 copies.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class CountedTensor:
    """A tensor with its counts."""

    entry: CapturedTensor
    #: The captured values, memory-mapped; in `values`, codes of block scales are decoded.
    raw: Tensor
    values: Tensor
    counted: Histogram
    #: The statistics of `quantexp.capture.statistics.summary`, with `shape` and `dtype`; missing values are None.
    record: dict[str, Any]

    @property
    def finding(self) -> str | None:
        """The anomaly shown beside the figures; None for an ordinary tensor."""
        return finding_of(self.record)


def finding_of(record: Mapping[str, Any]) -> str | None:
    """The anomaly of a tensor with these statistics; None for an ordinary tensor."""
    finite = record["count"] - record["nonfinite"]
    if not record["count"]:
        return "empty"
    if not finite:
        return f"nothing finite: {nonfinite_words(record)}"
    if record["zeros"] == record["count"]:
        return "all zero"
    odd = [nonfinite_words(record)] if record["nonfinite"] else []
    if record["min"] == record["max"] and finite > 1:
        odd.append(f"constant {record['min']:.6g}")
    return ", ".join(odd) or None


def nonfinite_words(record: Mapping[str, Any]) -> str:
    """`3 NaN, 1 Inf`."""
    counts = {"NaN": record["nan"], "Inf": record["inf"]}
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


@dataclass(frozen=True)
class StatisticsOnly:
    """A tensor and its captured statistics."""

    entry: CapturedTensor
    #: The statistics with shape and dtype, as in `CountedTensor.record`.
    record: dict[str, Any]

    @classmethod
    def of(cls, entry: CapturedTensor) -> StatisticsOnly:
        """The statistics of a line without a file."""
        metadata = entry.metadata
        about = {"shape": list(metadata.get("shape") or ()), "dtype": str(metadata.get("dtype"))}
        return cls(entry, about | dict(metadata["statistics"]))

    @property
    def finding(self) -> str | None:
        """The anomaly shown beside the figures; None for an ordinary tensor."""
        return finding_of(self.record)


@torch.no_grad()
def count_values(entry: CapturedTensor) -> CountedTensor:
    """Read a tensor and count it.

    Raises:
        CaptureError: it is missing, damaged, differs from its hash, or holds no plain numbers.
    """
    raw = entry.verified()
    values = _numbers(entry, raw)
    usable = values if values.dtype in INPUT_DTYPES else values.to(torch.float32)
    summary, counted = summarise_counted(usable)
    record = summary.record()
    if not counted.exact and record["quantiles"] is not None:
        record["quantiles"] = dict(
            zip(map(str, QUANTILES), exact_quantiles(usable, counted, QUANTILES), strict=True)
        )
    about = {"shape": list(raw.shape), "dtype": str(raw.dtype).removeprefix("torch.")}
    if largest := largest_tokens(entry.folder, entry.metadata, usable):
        record["largest"] = list(largest)
    return CountedTensor(entry, raw, usable, counted, about | record)


def _numbers(entry: CapturedTensor, raw: Tensor) -> Tensor:
    """Decode block scales, without the per-tensor scale of NVFP4."""
    metadata = entry.metadata
    if not str(metadata.get("tensor")).endswith(SCALE) or raw.dtype != torch.uint8:
        return raw
    declared = (metadata.get("formats") or {}).get(metadata.get("slot", ""), {})
    try:
        fmt = format_of_record(declared)
        return scale_values(raw, torch.ones(()), fmt)
    except ValueError as error:
        raise CaptureError(f"{entry.path}: scales of an unknown format: {error}") from error


def exact_quantiles(x: Tensor, counted: Histogram, shares: Sequence[float]) -> list[float]:
    """Quantiles of float32 values, with linear interpolation, as numpy's default.

    `counted` has the bin of each quantile and the number of elements below it; the elements of those few bins are then
    sorted.
    """
    cumulative = counted.counts.cumsum(0)
    n = int(cumulative[-1])
    position = torch.tensor(shares, dtype=torch.float64) * (n - 1)
    ranks = torch.cat([position.floor(), position.ceil()]).to(torch.int64)
    bins = torch.searchsorted(cumulative, ranks, right=True)
    wanted = torch.zeros(1 << 16, dtype=torch.bool)
    wanted[_upper(counted.values[bins].to(torch.float32))] = True
    sorted_, _ = _chosen(x, wanted).sort()
    chosen_bins = torch.unique(bins)
    below = cumulative[chosen_bins] - counted.counts[chosen_bins]
    starts = counted.counts[chosen_bins].cumsum(0) - counted.counts[chosen_bins]
    place = torch.searchsorted(chosen_bins, bins)
    values = sorted_[ranks - below[place] + starts[place]].to(torch.float64)
    low, high = values.chunk(2)
    quantiles: list[float] = (low + (high - low) * (position - position.floor())).tolist()
    return quantiles


def _upper(values_N: Tensor) -> Tensor:
    """The upper half of float32 bits, as an index."""
    return values_N.unsqueeze(1).view(torch.uint16)[:, 1].to(torch.int64)


def _chosen(x: Tensor, wanted: Tensor) -> Tensor:
    """The elements with the selected upper halves."""
    x_N = in_memory_order(x, memory_order(x)).view(-1)
    parts = [part_N[wanted[_upper(part_N)]] for part_N in torch.split(x_N, _CHUNK)]
    return torch.cat(parts)
