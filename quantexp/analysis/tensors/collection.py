"""One captured tensor's line of the manifest as a record.

`file` is relative to the capture folder, and in a shard `key` and `offsets` say which of its tensors. A weight is
stored once and referred to by the forward's line and the backward's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Record:
    """One line of the manifest: one captured tensor."""

    #: Relative to the capture folder; None where only statistics were kept.
    file: str | None
    #: qkv, proj, fc1, fc2, attention, expert7-fc1, ...
    module: str
    #: Global, from 0; -1 where an old collection does not say it.
    layer: int
    #: attention or linear.
    layer_type: str
    #: forward or backward.
    operation: str
    #: pre or post the operation.
    phase: str
    #: FA or linear.
    component: str
    #: mxfp8, mxfp4, hifp8 or bf16.
    quant_type: str
    #: query, key, value, input, weight, output, grad_output, ...
    tensor: str
    iteration: int
    #: None where the tensor belongs to no single micro-batch.
    micro_batch: int | None
    rank: int
    shape: tuple[int, ...]
    #: As torch names it, without `torch.`.
    dtype: str
    bytes: int
    #: Of the content; None where it was not computed.
    hash: str | None
    #: Slot ("fprop.x") -> format and options; every slot of the module.
    formats: Mapping[str, Mapping[str, Any]]
    #: The tensor's key and bytes in a shard; None where it has a file of its own.
    key: str | None = None
    offsets: tuple[int, int] | None = None
    #: Of which sequence of the micro-batch each row is; None where a dimension says it (a routed expert alone has it).
    row_sequences: Sequence[int] | None = None

    @property
    def label(self) -> str:
        """How messages and figures name the tensor: `fc1 L3 backward grad_output`."""
        layer = f" L{self.layer}" if self.layer >= 0 else ""
        return f"{self.module}{layer} {self.operation} {self.tensor}"

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Record:
        """The record of a line that may lack fields, as what an old collection's file names say does.

        The module is then the layer type, the layer -1, the iteration and rank 0, and there are no formats.
        """
        known: dict[str, Any] = {
            field.name: value
            for field in fields(cls)
            if (value := metadata.get(field.name)) is not None
        }
        unknown: dict[str, Any] = {
            **dict.fromkeys(("file", "micro_batch", "hash")),
            **dict.fromkeys(
                ("module", "layer_type", "operation", "phase", "component", "quant_type"), ""
            ),
            **{"tensor": "", "dtype": "", "layer": -1, "iteration": 0, "rank": 0, "bytes": 0},
            **{"module": str(metadata.get("layer_type") or ""), "formats": {}},
        }
        shape = tuple(known.get("shape", ()))
        return cls(**unknown | known | {"file": known.get("file") or None, "shape": shape})
