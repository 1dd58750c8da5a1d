"""A `.pt` file for each captured tensor: `{"tensor": ..., "metadata": {...}}`, written by `torch.save`.

A file is written under a temporary name and renamed, so a file with its final name is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.folders import written_beside


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

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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
            values.stored.place = {"file": values.name}
