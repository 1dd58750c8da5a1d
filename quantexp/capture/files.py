"""A `.pt` file for each captured tensor: `{"tensor": ..., "metadata": {...}}`.

A file is written beside its place and renamed: what has its name is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class PtFiles:
    """Writes each tensor into a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, values: Tensor, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Write a contiguous CPU tensor with its metadata; its place, as the manifest has it.

        Raises:
            OSError, RuntimeError: it cannot be written; nothing of it stays.
        """
        path = self.folder / name
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"tensor": values, "metadata": metadata}, part)
            part.rename(path)
        except (OSError, RuntimeError):
            part.unlink(missing_ok=True)
            raise
        return {"file": name}

    def seal(self) -> None:
        """Nothing is left open."""
