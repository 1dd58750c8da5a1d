"""Tensors with captured statistics only: their records, and the names of their figures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantexp.analysis.draw.look import finding_of
from quantexp.capture.names import TensorName
from quantexp.capture.reader import CapturedTensor


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


def statistics_name(metadata: Mapping[str, Any]) -> str:
    """A name like that of a captured file, without timestamp, and with iteration, micro-batch and rank at the end."""
    words = ("module", "operation", "phase", "tensor", "quant_type")
    name = TensorName(int(metadata.get("layer", -1)), **{w: str(metadata.get(w)) for w in words})
    when = (("iteration", "i"), ("micro_batch", "m"), ("rank", "r"))
    ends = [f"{letter}{value}" for key, letter in when if (value := metadata.get(key)) is not None]
    return "_".join(
        [
            f"{name.quant_type}/{name.layer_type}",
            *(name.layer_idx, name.operation, name.phase, name.component),
            *(name.quant_type, name.tensor, *ends),
        ]
    )


def statistics_key(metadata: Mapping[str, Any]) -> list[Any]:
    """The inputs of the figures."""
    content = json.dumps([metadata.get("statistics"), metadata.get("formats")], sort_keys=True)
    return ["statistics", hashlib.blake2b(content.encode(), digest_size=12).hexdigest()]
