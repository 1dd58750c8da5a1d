"""Shards: the captured tensors of a batch in one safetensors file.

    shards/rank0-00001.safetensors

A shard is written under a temporary name and renamed, so a shard with its final name is complete. A tensor's key is the
name of its `.pt` file without the suffix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from quantexp.capture.store.files import Values
from quantexp.model.safetensors import write_safetensors

#: The folder of the shards in the capture folder.
SHARDS = "shards"


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
