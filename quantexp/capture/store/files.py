"""A `.pt` file for each captured tensor: `{"tensor": ..., "metadata": {...}}`.

A file is written beside its place and renamed: what has its name is whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.capture.store.archive import archive, takes
from quantexp.capture.store.batch_writer import Whole, write_files
from quantexp.capture.store.batch_writer import takes as takes_whole
from quantexp.capture.store.content import hash_and_crc
from quantexp.capture.store.direct import LEAST_BYTES, DirectFile, goes_past
from quantexp.folders import beside


@dataclass
class Prepared:
    """Values that are to be written."""

    name: str
    values: Tensor
    hash: str
    #: Of their file, in order; None where `torch.save` makes it.
    parts: Sequence[memoryview] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: Where they are, as the manifest has it, once they are written.
    place: dict[str, Any] | None = None


class PtFiles:
    """Writes each tensor into a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepared(self, name: str, values: Tensor, metadata: Mapping[str, Any]) -> Prepared:
        """All of a contiguous CPU tensor and its metadata but the writing."""
        found, crc = hash_and_crc(values)
        parts = archive(values, crc, metadata) if takes(values) else None
        return Prepared(name, values, found, parts, metadata)

    def write(self, together: Sequence[Prepared], is_behind: bool) -> None:
        """Write values and say where; through the system's cache where more waits than the disk takes.

        Raises:
            OSError, RuntimeError: one cannot be written; it leaves no file. Those with a place are.
        """
        rest = list(together)
        while rest:
            num_written = self._write_many(rest, is_behind)
            if num_written == 0:
                self._write(rest[0], is_behind)
                num_written = 1
            for one in rest[:num_written]:
                one.place = {"file": one.name}
            rest = rest[num_written:]

    def _write_many(self, together: Sequence[Prepared], is_behind: bool) -> int:
        """How many were written in one go, from the first on; the next is to be written alone."""
        files = []
        for one in together:
            path = self.folder / one.name
            if one.parts is None:
                break
            past_cache = not is_behind and goes_past(one.parts, path.parent)
            whole = Whole(path, one.parts, past_cache)
            if not takes_whole(whole):
                break
            files.append(whole)
        for folder in {whole.path.parent for whole in files}:
            folder.mkdir(parents=True, exist_ok=True)
        return write_files(files)

    def _write(self, one: Prepared, is_behind: bool) -> None:
        path = self.folder / one.name
        part = beside(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if one.parts is None:
                torch.save({"tensor": one.values, "metadata": one.metadata}, part)
            else:
                _write_parts(part, one.parts, is_behind)
            part.rename(path)
        except (OSError, RuntimeError):
            part.unlink(missing_ok=True)
            raise

    def seal(self) -> None:
        """Nothing is left open."""


def _write_parts(path: Path, parts: Sequence[memoryview], is_behind: bool) -> None:
    is_small = sum(map(len, parts)) < LEAST_BYTES
    file = DirectFile(path, os.O_TRUNC, past_cache=not (is_behind or is_small))
    try:
        file.write_at(parts, 0)
    finally:
        file.close()
