"""One captured tensor: its metadata, and its values on request; of a divided tensor, from the parts that ranks stored.

The metadata of a divided tensor is that of the whole one: its shape and statistics, the sum of the parts' bytes, and
the first part's place and rank. `statistics` are `combined` or, where that is impossible, left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from quantexp.capture.assembly import assembled, require_cover
from quantexp.capture.lines import tensor_key
from quantexp.capture.parts import Part
from quantexp.capture.statistics.counts import Counts, from_json
from quantexp.capture.statistics.moments import moments
from quantexp.capture.store.manifest import ManifestLine
from quantexp.capture.store.values import has_hash, load_values, name_of, path_of
from quantexp.errors import CaptureError
from quantexp.model.decoder import OUTPUT

#: Keys of a part's line that its whole tensor has not, or has otherwise.
_OF_PART = frozenset({"shard", "hash", "statistics"})
#: Statistics that add up, and those that follow from the parts' moments and extremes.
_COUNTS = ("count", "zeros", "nonfinite", "nan", "inf")
_MOMENTS = ("mean", "std", "min", "max", "abs_max", "skew", "kurtosis")


@dataclass(frozen=True)
class CapturedTensor:
    """One captured tensor: its metadata, and its values on request."""

    folder: Path
    metadata: ManifestLine
    #: The stored parts of a divided tensor, by rank; none if the tensor is stored whole.
    parts: tuple[CapturedTensor, ...] = ()

    @classmethod
    def of(cls, folder: Path, line: Mapping[str, Any]) -> CapturedTensor:
        """The tensor of a parsed line, whose values nobody has checked."""
        return cls(folder, cast(ManifestLine, line))

    @property
    def stored(self) -> tuple[CapturedTensor, ...]:
        """The entries with a file of their own: the parts, or the tensor itself."""
        return self.parts or (self,)

    @property
    def path(self) -> Path:
        """The file with the tensor's values; of a divided tensor, with those of its first part.

        Raises:
            CaptureError: there is none, or it lies outside the folder.
        """
        if not self.metadata.get("file"):
            why = self.metadata.get("left_out", "only statistics were kept")
            raise CaptureError(f"{self.label} of {self.folder} has no values: {why}")
        return path_of(self.folder, self.metadata)

    @property
    def name(self) -> str:
        """The file's name relative to the folder, or the key in a shard; both have the same form, without a suffix.

        Raises:
            CaptureError: as for `path`, or the key leads out of the folder.
        """
        return name_of(self.folder, self.metadata)

    @property
    def label(self) -> str:
        """`L3 fc1 backward grad_output`, from the known parts; the output layer has no number."""
        layer, module = self.metadata.get("layer"), self.metadata.get("module")
        words: list[object] = [None if layer is None or module == OUTPUT else f"L{layer}"]
        words += [self.metadata.get(key) for key in ("module", "operation", "tensor")]
        return " ".join(str(word) for word in words if word is not None)

    def torch(self) -> Tensor:
        """The values, memory-mapped copy-on-write; those of a divided tensor are copied together.

        Raises:
            CaptureError: there are no values, a part of them or the file is missing, or it is not a file of captured
                values.
        """
        if self.parts:
            return self._assembled(CapturedTensor.torch)
        return load_values(self.path, self.metadata)

    def _assembled(self, load: Callable[[CapturedTensor], Tensor]) -> Tensor:
        self.require_complete()
        try:
            return assembled([(part_of(part), load(part)) for part in self.parts])
        except ValueError as error:
            raise CaptureError(f"{self.label} of {self.folder}: {error}") from error

    def require_complete(self) -> None:
        """Refuse a divided tensor without all of its parts.

        Raises:
            CaptureError: names the missing ranges, or those that are there twice.
        """
        if (why := self.incompleteness()) is not None:
            raise CaptureError(
                f"{self.label} of {self.folder} cannot be put together: {why}; open the folders of all ranks together"
            )

    def incompleteness(self) -> str | None:
        """The ranges of a divided tensor that its parts lack, or have twice, in words; None if there are none."""
        if not self.parts:
            return None
        try:
            require_cover([part_of(part) for part in self.parts])
        except ValueError as error:
            return str(error)
        return None

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values, memory-mapped; bfloat16, which numpy does not support, is widened to float32."""
        values = self.torch()
        values = values.float() if values.dtype == torch.bfloat16 else values
        array: np.ndarray[Any, Any] = values.numpy()
        return array

    def is_intact(self) -> bool | None:
        """Whether the values have the manifest's hash; None if the manifest has no hash.

        Raises:
            CaptureError: the file holds no such tensor, or the kind of hash is unknown.
        """
        if self.parts:
            intact = [part.is_intact() for part in self.parts]
            return None if None in intact else all(intact)
        return None if self.metadata.get("hash") is None else self._has_hash(self.torch())

    def verified(self) -> Tensor:
        """`torch()`, with the manifest's hash, if it has one.

        Raises:
            CaptureError: as for `torch`, the file cannot be read, or it holds other values.
        """
        if self.parts:
            return self._assembled(CapturedTensor.verified)
        try:
            values = self.torch()
            if self.metadata.get("hash") is not None and not self._has_hash(values):
                raise CaptureError(f"{self.path} holds other values than the manifest's hash says")
        except OSError as error:
            raise CaptureError(f"{self.path} cannot be read: {error.strerror or error}") from error
        return values

    def _has_hash(self, values: Tensor) -> bool:
        try:
            return has_hash(values, str(self.metadata["hash"]))
        except CaptureError as error:
            raise CaptureError(f"{self.path}: {error}") from error


def part_of(entry: CapturedTensor) -> Part:
    """The part that an entry is of its whole tensor.

    Raises:
        ValueError: its ranges do not fit.
    """
    return Part.of(entry.metadata)


def whole_tensors(
    entries: Iterable[CapturedTensor],
    report: Callable[[CaptureError], None] = lambda error: None,
) -> list[CapturedTensor]:
    """The entries with all parts of a divided tensor as one, where the first of them was.

    A part whose ranges are impossible is reported and left out.
    """
    groups: dict[object, list[CapturedTensor]] = {}
    for number, entry in enumerate(entries):
        if "shard" not in entry.metadata:
            groups[number] = [entry]
            continue
        try:
            part = part_of(entry)
        except ValueError as error:
            report(CaptureError(f"{entry.label} of {entry.folder}: {error}"))
            continue
        groups.setdefault(_whole_key(entry, part), []).append(entry)
    return [
        _merged(parts) if "shard" in parts[0].metadata else parts[0] for parts in groups.values()
    ]


def _whole_key(entry: CapturedTensor, part: Part) -> tuple[object, ...]:
    line = entry.metadata
    key = tensor_key({**line, "rank": None})
    return (*key, line.get("data_rank"), line.get("dtype"), part.whole, part.summands)


def _merged(parts: Sequence[CapturedTensor]) -> CapturedTensor:
    parts = sorted(parts, key=lambda part: part.metadata.get("rank") or 0)
    metadata: dict[str, Any] = {k: v for k, v in parts[0].metadata.items() if k not in _OF_PART}
    whole = part_of(parts[0])
    metadata |= {"shape": list(whole.whole)}
    if statistics := _statistics(parts, whole):
        metadata |= {"statistics": statistics}
    if starts := [each for part in parts if (each := part.metadata.get("document_starts"))]:
        sequences = zip(*starts, strict=False)  # a rank has the documents of its own queries
        metadata |= {"document_starts": [sorted(set().union(*each)) for each in sequences]}
    absent = [part for part in parts if not part.metadata.get("file")]
    if "file" in metadata and absent:
        metadata |= {"file": None, "bytes": 0}
        reasons = (part.metadata.get("left_out") for part in absent)
        if reason := next(filter(None, reasons), None):
            metadata |= {"left_out": reason}
    elif "bytes" in metadata:
        metadata["bytes"] = sum(part.metadata.get("bytes") or 0 for part in parts)
    return CapturedTensor(parts[0].folder, cast(ManifestLine, metadata), tuple(parts))


def _statistics(parts: Sequence[CapturedTensor], whole: Part) -> dict[str, Any] | None:
    """The statistics of the whole tensor; None if a part's are not there, or if it is a sum."""
    try:
        sample = parts[0].metadata.get("sample")
        count = math.prod(whole.whole if sample is None else sample["shape"])
        result = combined([part.metadata["statistics"] for part in parts])
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None  # statistics of a damaged line, or none
    return result if whole.summands == 1 and result["count"] == count else None


def combined(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The statistics of a tensor from those of its parts, each a record of `statistics`.

    Counts, minimum, maximum, amax and the histogram over exponents are exact; mean, standard deviation, skewness and
    kurtosis, from the parts' central moments, up to rounding. Quantiles and the fidelity of a format are None. Of a sum
    of tensors nothing follows.
    """
    counts = {key: sum(record[key] for record in records) for key in _COUNTS}
    finite = [record for record in records if record["count"] > record["nonfinite"]]
    magnitudes = sum((from_json(record["log2_magnitude"]) for record in records), Counts())
    outside = {
        key: sum(record["log2_magnitude"][key] for record in records) for key in ("below", "above")
    }
    return {
        **counts,
        "zero_share": counts["zeros"] / counts["count"] if counts["count"] else None,
        **(_combined_moments(finite) if finite else dict.fromkeys(_MOMENTS)),
        "quantiles": None,
        "log2_magnitude": {**outside, **magnitudes.json()},
        **({"fidelity": None} if any("fidelity" in record for record in records) else {}),
    }


def _combined_moments(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Moments about the mean of all, from each part's moments about its own (Chan, Golub and LeVeque 1983)."""
    sizes = [record["count"] - record["nonfinite"] for record in records]
    total = sum(sizes)
    mean = math.fsum(n * record["mean"] for n, record in zip(sizes, records, strict=True)) / total
    m2, m3, m4 = (
        math.fsum(n * _about(record, mean)[k] for n, record in zip(sizes, records, strict=True))
        / total
        for k in range(3)
    )
    return moments(mean, m2, m3, m4, min(r["min"] for r in records), max(r["max"] for r in records))


def _about(record: Mapping[str, Any], mean: float) -> tuple[float, float, float]:
    """The second to fourth moments of a part about another mean."""
    d, m2 = record["mean"] - mean, record["std"] ** 2
    m3, m4 = (record["skew"] or 0.0) * m2**1.5, (record["kurtosis"] or 0.0) * m2**2
    return m2 + d**2, m3 + 3 * d * m2 + d**3, m4 + 4 * d * m3 + 6 * d**2 * m2 + d**4
