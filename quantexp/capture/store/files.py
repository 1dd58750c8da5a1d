"""A `.pt` file for each captured tensor: `{"tensor": ..., "metadata": {...}}`.

A file is written under a temporary name and renamed, so a file with its final name is complete.
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
    """Values ready to be written."""

    name: str
    values: Tensor
    hash: str
    #: The parts of their file, in order; None if `torch.save` writes the file.
    parts: Sequence[memoryview] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: Their location as in the manifest, once they are written.
    place: dict[str, Any] | None = None


class PtFiles:
    """Writes each tensor into its own file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepared(self, name: str, values: Tensor, metadata: Mapping[str, Any]) -> Prepared:
        """Do all work for a contiguous CPU tensor and its metadata except the write."""
        content, crc = hash_and_crc(values)
        parts = archive(values, crc, metadata) if takes(values) else None
        return Prepared(name, values, content, parts, metadata)

    def write(self, together: Sequence[Prepared], is_behind: bool) -> None:
        """Write values and set their places; through the page cache if the writer is behind.

        Raises:
            OSError, RuntimeError: a file cannot be written and does not exist; values with a place are written.
        """
        rest = list(together)
        while rest:
            num_written = self._write_many(rest, is_behind)
            if num_written == 0:
                self._write(rest[0], is_behind)
                num_written = 1
            for item in rest[:num_written]:
                item.place = {"file": item.name}
            rest = rest[num_written:]

    def _write_many(self, together: Sequence[Prepared], is_behind: bool) -> int:
        """Write the leading items in one call and return their number; the next item must be written alone."""
        files = []
        for item in together:
            path = self.folder / item.name
            if item.parts is None:
                break
            past_cache = not is_behind and goes_past(item.parts, path.parent)
            whole = Whole(path, item.parts, past_cache)
            if not takes_whole(whole):
                break
            files.append(whole)
        for folder in {whole.path.parent for whole in files}:
            folder.mkdir(parents=True, exist_ok=True)
        return write_files(files)

    def _write(self, item: Prepared, is_behind: bool) -> None:
        path = self.folder / item.name
        part = beside(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if item.parts is None:
                torch.save({"tensor": item.values, "metadata": item.metadata}, part)
            else:
                _write_parts(part, item.parts, is_behind)
            part.rename(path)
        except (OSError, RuntimeError):
            part.unlink(missing_ok=True)
            raise

    def seal(self) -> None:
        """Do nothing: no file is left open."""


def _write_parts(path: Path, parts: Sequence[memoryview], is_behind: bool) -> None:
    is_small = sum(map(len, parts)) < LEAST_BYTES
    file = DirectFile(path, os.O_TRUNC, past_cache=not (is_behind or is_small))
    try:
        file.write_at(parts, 0)
    finally:
        file.close()
