"""A capture folder, read: its manifest's lines as records, and the tensors they refer to.

`manifest.jsonl` holds one JSON object a line; `file` is relative to the capture folder, and in a
shard `key` and `offsets` say which of its tensors. A weight is stored once and referred to by the
forward's line and the backward's. A line that is no JSON object was torn by a crash: it is counted
and left out. A line that is one but lacks a field was written by something else, and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from quantexp.capture.manifest import MANIFEST
from quantexp.capture.values import load_values, path_of
from quantexp.errors import CaptureError


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
    def stored(self) -> str | None:
        """What tells stored values apart: the file, or the key in a shard; None without values."""
        return self.file if self.key is None else self.key

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


@dataclass(frozen=True)
class Collection:
    """What a manifest says and what of it is there."""

    records: tuple[Record, ...]
    #: Lines of the manifest that a crash tore, counted from 1.
    torn_lines: tuple[int, ...] = ()
    #: Files that the manifest names and the folder does not have.
    missing: tuple[str, ...] = ()


def read_manifest(tensors_dir: Path) -> list[Record]:
    """The records of a capture folder, in the order in which they were written.

    Raises:
        CaptureError: as `read_collection` does.
    """
    return list(read_collection(tensors_dir).records)


def read_collection(tensors_dir: Path) -> Collection:
    """The records of a capture folder, with the torn lines and the missing files.

    Raises:
        CaptureError: no folder, no manifest, nothing in it, or a line that lacks a field.
    """
    lines = _manifest_lines(tensors_dir)
    records: list[Record] = []
    torn: list[int] = []
    for number, line in enumerate(lines, start=1):
        values = _json_object(line)
        if values is not None:
            records.append(_record(values, f"{tensors_dir / MANIFEST}:{number}"))
        elif line.strip():
            torn.append(number)
    if not records:
        raise CaptureError(_nothing_there(tensors_dir, f"{MANIFEST} has no complete line"))
    missing = tuple(name for name, path in _files(tensors_dir, records) if not path.is_file())
    return Collection(tuple(records), tuple(torn), missing)


def _files(tensors_dir: Path, records: Iterable[Record]) -> Iterator[tuple[str, Path]]:
    """Each file that is named, with the place where it is."""
    first: dict[str, Record] = {}
    for record in records:
        if record.file is not None:
            first.setdefault(record.file, record)
    for file, record in first.items():
        yield file, path_of(tensors_dir, asdict(record))


def unique_files(records: Iterable[Record]) -> list[Record]:
    """One record for what is stored once, the first that names it, so that bytes count once."""
    first: dict[str, Record] = {}
    for record in records:
        if record.stored is not None:
            first.setdefault(record.stored, record)
    return list(first.values())


def load_tensor(tensors_dir: Path, record: Record) -> torch.Tensor:
    """The tensor of a record, memory-mapped, so that only what is looked at is read.

    Raises:
        CaptureError: the file is missing, damaged, outside the folder or holds no tensor, or only
            statistics were kept.
    """
    if record.file is None:
        raise CaptureError(
            f"{record.label}: only statistics were captured, no tensor; run with capture=tensors"
        )
    metadata = asdict(record)
    return load_values(path_of(tensors_dir, metadata), metadata)


def _manifest_lines(tensors_dir: Path) -> list[str]:
    manifest = tensors_dir / MANIFEST
    if not tensors_dir.is_dir():
        raise CaptureError(_nothing_there(tensors_dir, "there is no such folder"))
    if not manifest.is_file():
        raise CaptureError(_nothing_there(tensors_dir, f"there is no {MANIFEST}"))
    return manifest.read_text(encoding="utf-8", errors="replace").splitlines()


def _nothing_there(tensors_dir: Path, reason: str) -> str:
    return (
        f"{tensors_dir} holds no captured tensors: {reason}; expected {MANIFEST} and the "
        "files it names; give the tensors folder of a run that captured, "
        "or run with capture=tensors"
    )


def _json_object(line: str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return None
    return values if isinstance(values, dict) else None


def _record(values: dict[str, Any], where: str) -> Record:
    """The record; fields that a later version may add are ignored."""
    names = [field.name for field in fields(Record)]
    required = [field.name for field in fields(Record) if field.default is MISSING]
    absent = [name for name in required if name not in values]
    if absent:
        raise CaptureError(
            f"{where} lacks {', '.join(absent)}; every line must have {', '.join(required)}; "
            "was it written by quantexp?"
        )
    known = {name: values[name] for name in names if name in values}
    return Record(**known | {"file": known["file"] or None, "shape": tuple(known["shape"])})
