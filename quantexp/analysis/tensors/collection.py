"""A line of the manifest, one captured tensor, as a record.

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

    #: Relative to the capture folder; None if only statistics were kept.
    file: str | None
    #: qkv, proj, fc1, fc2, attention, expert7-fc1, ...
    module: str
    #: Global, from 0; -1 if an old collection does not have it.
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
    #: None if the tensor belongs to no single micro-batch.
    micro_batch: int | None
    rank: int
    shape: tuple[int, ...]
    #: The name in torch, without `torch.`.
    dtype: str
    bytes: int
    #: The content hash; None if it was not computed.
    hash: str | None
    #: Slot ("fprop.x") -> format and options; every slot of the module.
    formats: Mapping[str, Mapping[str, Any]]
    #: The tensor's key and bytes in a shard; None if it has its own file.
    key: str | None = None
    offsets: tuple[int, int] | None = None
    #: The sequence of each row of a routed expert; None for other tensors, which have a sequence dimension.
    row_sequences: Sequence[int] | None = None

    @property
    def label(self) -> str:
        """The label in messages and figures: `fc1 L3 backward grad_output`."""
        layer = f" L{self.layer}" if self.layer >= 0 else ""
        return f"{self.module}{layer} {self.operation} {self.tensor}"

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Record:
        """The record of a line that may lack fields, such as the metadata from an old collection's file names.

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
