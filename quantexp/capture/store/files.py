"""Writes values into the capture folder: each tensor into a file of its own, or many into shards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.capture.store.by_type import link
from quantexp.folders import written_beside
from quantexp.model.safetensors import write_safetensors

#: The folder of the shards in the capture folder.
SHARDS = "shards"


@dataclass
class Stored:
    """Values in the capture folder; their location and hash are known once they are written."""

    num_bytes: int
    #: `file`, and in a shard `key` and `offsets`.
    place: dict[str, Any] = field(default_factory=dict)
    hash: str | None = None


@dataclass(frozen=True)
class Values:
    """A contiguous CPU tensor to be written."""

    #: The name of its `.pt` file relative to the folder.
    name: str
    tensor: Tensor
    metadata: Mapping[str, Any]
    stored: Stored


class PtFiles:
    """Writes each tensor into its own file."""

    #: Maximum lines and bytes of a batch. Batches exist because each step of the background thread takes the GIL from
    #: training.
    batch_lines, batch_bytes = 64, 1 << 24

    def __init__(self, folder: Path, *, by_type: bool = False) -> None:
        self.folder, self._by_type = folder, by_type

    def write(self, batch: Sequence[Values]) -> None:
        """Write values and set their places.

        Raises:
            OSError, RuntimeError: a file cannot be written and does not exist; values with a place are written.
        """
        for values in batch:
            path = self.folder / values.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_beside(path) as part:
                torch.save({"tensor": values.tensor, "metadata": values.metadata}, part)
            if self._by_type:
                link(self.folder, values.name)
            values.stored.place = {"file": values.name}


class ShardFiles:
    """Writes one rank's tensors into shards."""

    #: A batch with so many lines or bytes is written.
    batch_lines, batch_bytes = 1 << 12, 1 << 28

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def write(self, batch: Sequence[Values]) -> None:
        """Write values into a new shard, and set their places.

        Raises:
            OSError: the shard cannot be written and does not exist.
        """
        if not batch:
            return
        path = self._next()
        tensors = {values.name.removesuffix(".pt"): values.tensor for values in batch}
        offsets = write_safetensors(path, tensors, {"format": "pt"})
        for key, values in zip(tensors, batch, strict=True):
            file = str(path.relative_to(self.folder))
            values.stored.place = {"file": file, "key": key, "offsets": offsets[key]}

    def _next(self) -> Path:
        """The first name that no earlier shard has."""
        folder = self.folder / SHARDS
        folder.mkdir(parents=True, exist_ok=True)
        pattern = re.compile(rf"rank{self.rank}-(\d+)\.safetensors")
        numbers = [
            int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))
        ]
        return folder / f"rank{self.rank}-{max(numbers, default=0) + 1:05d}.safetensors"
