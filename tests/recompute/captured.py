"""Reads a capture like an outside program: `manifest.jsonl` and the `.pt` files, without quantexp.

Torch opens the files, `weights_only=True`; from there on everything is numpy in float64, which holds every bf16 value.
Only the tensors of a model-parallel layout, which the ranks stored in parts, come whole from quantexp's reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from quantexp.capture import open_capture

Array = npt.NDArray[np.float64]
#: One operand's format and options, as the manifest's `formats` has it.
Slot = Mapping[str, Any]

_BY_TOKEN = ("input", "output", "grad_output", "grad_input")
#: Fields of the manifest's line that the metadata inside the file lacks.
_FILE_FIELDS = ("file", "bytes", "hash")


@dataclass
class Module:
    """One module's tensors of one micro-batch, and the metadata that they share."""

    layer: int
    name: str
    layer_type: str
    dtype: str
    softmax_scale: float | None
    formats: dict[str, Slot]
    #: The sequence of each row; None where the tensors have a dimension of sequences, or there is only one.
    row_sequences: list[int] | None = None
    #: What the slots of each micro-batch that the rows are from add to `formats`; empty if they are from one.
    row_sources: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    #: (operation, tensor) -> values
    tensors: dict[tuple[str, str], Array] = field(default_factory=dict)
    #: (operation, tensor) -> file below the capture's folder
    files: dict[tuple[str, str], str] = field(default_factory=dict)
    #: (operation, tensor) -> line of the manifest
    lines: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)

    def forward(self, tensor: str) -> Array:
        return self.tensors["forward", tensor]

    def backward(self, tensor: str) -> Array:
        return self.tensors["backward", tensor]

    def sources(self, formats: Mapping[str, Slot]) -> list[Module]:
        """The module with the rows of each micro-batch, of one sequence, and with the formats of that."""
        parts = []
        for source, state in enumerate(self.row_sources):
            own = np.array(self.row_sequences) == source
            tensors = {
                key: values[own] if key[1] in _BY_TOKEN else values
                for key, values in self.tensors.items()
            }
            merged: dict[str, Slot] = {
                slot: {**each, **state.get(slot, {})} for slot, each in formats.items()
            }
            part = replace(self, tensors=tensors, row_sequences=None, row_sources=[])
            parts.append(replace(part, formats=merged))
        return parts

    def __str__(self) -> str:
        return f"L{self.layer} {self.name}"


def read_capture(folder: Path, iteration: int = 1) -> list[Module]:
    """The modules of a capture of only an iteration's first micro-batch, in the order in which they ran."""
    modules: dict[tuple[int, str], Module] = {}
    for line, values in _tensors(folder):
        module = modules.setdefault((line["layer"], line["module"]), _module(line))
        assert (line["iteration"], line["micro_batch"]) == (iteration, 0)
        layer_type, dtype, formats = _shared(line)
        assert (layer_type, formats) == (module.layer_type, module.formats)
        kinds = ("uint8", "float32") if line["values"] == "scale" else (module.dtype,)
        assert dtype in kinds
        rows = line.get("row_sequences")
        if rows is not None:
            assert len(rows) == line["shape"][0]
            assert module.row_sequences in (None, rows)
            module.row_sequences = rows
            module.row_sources = line.get("row_sources", [])
        key = (line["operation"], line["tensor"])
        assert key not in module.tensors, f"{module} {key} is listed twice"
        module.tensors[key] = values
        module.files[key] = line["file"]
        module.lines[key] = line
    return list(modules.values())


def _tensors(folder: Path) -> Iterator[tuple[Mapping[str, Any], Array]]:
    """Each tensor of a micro-batch, with its line."""
    lines = map(json.loads, (folder / "manifest.jsonl").read_text().splitlines())
    of_micro_batch = [line for line in lines if line["micro_batch"] is not None]  # not main_grad
    if not any("data_rank" in line for line in of_micro_batch):
        for line in of_micro_batch:
            yield line, _values(folder, line)
        return
    for entry in open_capture(folder).select(micro_batch=0, data_rank=0):
        assert all(part.is_intact() for part in entry.stored)
        yield entry.metadata, entry.torch().double().numpy()


def _module(line: Mapping[str, Any]) -> Module:
    layer_type, dtype, formats = _shared(line)
    return Module(line["layer"], line["module"], layer_type, dtype, line["softmax_scale"], formats)


def _shared(line: Mapping[str, Any]) -> tuple[str, str, dict[str, Slot]]:
    return line["layer_type"], line["dtype"], line["formats"]


def _values(folder: Path, line: dict[str, Any]) -> Array:
    """The file's values; the metadata inside the file must equal the manifest's."""
    content = torch.load(folder / line["file"], weights_only=True)
    tensor, metadata = content["tensor"], content["metadata"]
    listed = {key: value for key, value in line.items() if key not in _FILE_FIELDS}
    if line["tensor"] == "weight":  # the backward's line refers to the forward's file
        listed["operation"] = metadata["operation"]
    assert metadata == listed
    assert list(tensor.shape) == line["shape"]
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert (len(raw), "xxh3_128:" + xxhash.xxh3_128_hexdigest(raw)) == (line["bytes"], line["hash"])
    values: Array = tensor.double().numpy()
    return values
