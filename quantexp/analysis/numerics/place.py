"""The place of a captured tensor in the model and run, for the columns of tables and the axes of figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantexp.analysis.tensors.collection import Record
from quantexp.analysis.tensors.inventory import experts_as_one
from quantexp.capture.record.operands import SCALE, source_of

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Place:
    """The place of a tensor from the manifest; `Record.from_metadata` defines missing values."""

    module: str
    layer: int
    layer_type: str
    operation: str
    phase: str
    tensor: str
    quant_type: str
    iteration: int
    micro_batch: int | None
    rank: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Place:
        """The place of a line of the manifest."""
        record = Record.from_metadata(metadata)
        return cls(
            record.module,
            record.layer,
            record.layer_type,
            record.operation,
            record.phase,
            record.tensor,
            record.quant_type,
            record.iteration,
            record.micro_batch,
            record.rank,
        )

    @property
    def kind(self) -> str:
        """The module with its tensor, with all experts as one: `fc1 input`; the key for comparing layers."""
        return f"{experts_as_one(self.module)} {self.tensor}"

    @property
    def source(self) -> str:
        """The source tensor of a quantised operand; any other tensor is its own source."""
        return source_of(self.tensor)

    @property
    def is_scale(self) -> bool:
        """Whether the values are codes of block scales."""
        return self.tensor.endswith(SCALE)

    @property
    def label(self) -> str:
        """`fc1 L3 backward grad_output`."""
        layer = f"L{self.layer}" if self.layer >= 0 else ""
        return " ".join(w for w in (self.module, layer, self.operation, self.tensor) if w)
