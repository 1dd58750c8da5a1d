"""The capture folder: `.pt` files, `manifest.jsonl` with a line for each tensor, `statistics.jsonl`.

A file is written beside its place and renamed, then its manifest line is appended, so that whatever the manifest
names is whole, after a crash too. Synchronous: the tensor is on disk when `add` returns. Ranks other than 0 list in
files of their own, which `manifest` joins at the end.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.capture.manifest import MANIFEST, STATISTICS, part_of
from quantexp.errors import CaptureError


@dataclass(frozen=True)
class Stored:
    """A file of the capture folder."""

    file: str
    num_bytes: int
    hash: str


class CaptureStore:
    """Writes one rank's captured tensors."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self.num_bytes = 0
        #: The file written last.
        self.last: Stored | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def add(self, file: str, tensor: Tensor, metadata: dict[str, Any]) -> None:
        """Store one tensor with its metadata, and list it.

        Raises:
            CaptureError: the disk is full or the folder cannot be written; nothing half-written stays.
        """
        values = tensor.detach().to("cpu", copy=True).contiguous()
        path = self.folder / file
        part = path.with_name(path.name + ".part")
        num_bytes = values.numel() * values.element_size()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"tensor": values, "metadata": metadata}, part)
            part.rename(path)
        except (OSError, RuntimeError) as error:
            failure = _cannot_write(path, error, num_bytes)
            part.unlink(missing_ok=True)
            raise failure from error
        self.num_bytes += num_bytes
        self.last = Stored(file, num_bytes, content_hash(values))
        self.refer(self.last, metadata)

    def refer(self, stored: Stored, metadata: dict[str, Any]) -> None:
        """List a tensor whose file is there."""
        line = {**metadata, "file": stored.file, "bytes": stored.num_bytes, "hash": stored.hash}
        self._append(MANIFEST, line)

    def add_statistics(self, metadata: dict[str, Any]) -> None:
        """Keep a tensor's statistics alone."""
        self._append(STATISTICS, metadata)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        path = part_of(self.folder / name, self.rank)
        try:
            with path.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise _cannot_write(path, error) from error


def content_hash(values: Tensor) -> str:
    """Hex sha256 of a contiguous CPU tensor's bytes, without its shape and dtype."""
    content: Any = values.view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()


def _cannot_write(path: Path, error: Exception, wanted_bytes: int = 0) -> CaptureError:
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    if isinstance(error, RuntimeError) and _free_bytes(path) < wanted_bytes:
        reason = os.strerror(errno.ENOSPC)  # torch's zip writer says where it noticed, not why
    return CaptureError(
        f"captured tensors cannot be written to {path}: {reason}; free some space, set capture.dir to "
        "another disk, or capture=stats"
    )


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path.parent).free
