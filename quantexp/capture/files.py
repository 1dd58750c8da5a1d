"""A `.pt` file for each captured tensor: `{"tensor": ..., "metadata": {...}}`.

A file is written beside its place and renamed: what has its name is whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.capture.archive import Archive, archive, takes
from quantexp.capture.content import hash_and_crc
from quantexp.capture.direct import DirectFile
from quantexp.capture.safetensors import content_of


@dataclass(frozen=True)
class Prepared:
    """Values that are to be written."""

    hash: str
    #: Writes them and gives their place, as the manifest has it; through the system's cache where it is told that more
    #: waits than the disk takes. Raises OSError or RuntimeError where it cannot; nothing of them stays.
    write: Callable[[bool], dict[str, Any]]


class PtFiles:
    """Writes each tensor into a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepared(self, name: str, values: Tensor, metadata: Mapping[str, Any]) -> Prepared:
        """All of a contiguous CPU tensor and its metadata but the writing."""
        found, crc = hash_and_crc(values)
        around = archive(values, crc, metadata) if takes(values) else None

        def write(is_behind: bool) -> dict[str, Any]:
            with self._beside(name) as part:
                if around is None:
                    torch.save({"tensor": values, "metadata": metadata}, part)
                else:
                    _write(part, around, content_of(values), is_behind)
            return {"file": name}

        return Prepared(found, write)

    @contextlib.contextmanager
    def _beside(self, name: str) -> Iterator[Path]:
        """Where the file is written until it is whole."""
        path = self.folder / name
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield part
            part.rename(path)
        except (OSError, RuntimeError):
            part.unlink(missing_ok=True)
            raise

    def seal(self) -> None:
        """Nothing is left open."""


def _write(path: Path, around: Archive, content: memoryview, is_behind: bool) -> None:
    file = DirectFile(path, os.O_TRUNC)
    try:
        file.write_at(around.head, 0)
        file.write_at(content, len(around.head), is_behind)
        file.write_at(around.tail, len(around.head) + len(content))
    finally:
        file.close()
