"""A checkpoint that is whole for whoever checks it, and holds no tensors."""

from __future__ import annotations

from pathlib import Path

import xxhash

from quantexp.model.checkpoint_hashes import record_hashes
from quantexp.model.checkpoints import STATE, STATE_INDEX, folder_of
from quantexp.runs.paths import RunDir


def save(run: RunDir, iteration: int, *, state: bool = True) -> Path:
    """A checkpoint with a file of weights, and the index of a training state or none."""
    folder = folder_of(run, iteration)
    (folder / STATE).mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(8) + b"weights")
    if state:
        (folder / STATE / STATE_INDEX).write_text("{}")
    # No tensors are read from these files.
    known = {"model.safetensors": {"bytes": 15, "xxh3_128": digest(folder), "tensors": {}}}
    record_hashes(folder, iteration, known)  # type: ignore[arg-type]
    return folder


def digest(folder: Path) -> str:
    """The hash of the weights."""
    return xxhash.xxh3_128_hexdigest((folder / "model.safetensors").read_bytes())
