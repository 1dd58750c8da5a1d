"""The removal of checkpoints that a run does not keep. Imports no torch.

A folder is renamed to a hidden name before its files are removed, so that a folder with a final name is always whole.
What a kill leaves under a hidden name is removed with the next one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from quantexp.folders import sync
from quantexp.model.checkpoints import folder_of, kept, saved_iterations
from quantexp.runs.paths import RunDir
from quantexp.schema import CheckpointConfig

#: The first character of a folder that is being written or removed, and the suffix of the latter.
HIDDEN, REMOVED = ".", ".removed"


def remove_others(run: RunDir, checkpoint: CheckpointConfig, iteration: int) -> None:
    """Remove the checkpoints before an iteration, whose own is whole, that do not stay.

    Raises:
        OSError: one cannot be removed.
    """
    for leftover in run.checkpoints.glob(f"{HIDDEN}*{REMOVED}"):
        shutil.rmtree(leftover)
    saved = [each for each in saved_iterations(run) if each <= iteration]
    for each in sorted(set(saved) - set(kept(checkpoint, saved))):
        remove(folder_of(run, each))


def remove(folder: Path) -> None:
    """Remove a checkpoint.

    Raises:
        OSError: it cannot be renamed or removed.
    """
    hidden = folder.with_name(f"{HIDDEN}{folder.name}{REMOVED}")
    if hidden.exists():
        shutil.rmtree(hidden)
    folder.rename(hidden)
    sync(folder.parent)
    shutil.rmtree(hidden)
