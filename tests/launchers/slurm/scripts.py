"""Requests, batches, and the lines of their scripts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from quantexp_launchers.slurm.batch import Batch

from quantexp.schema import LauncherConfig


def launcher(**keys: Any) -> LauncherConfig:
    return LauncherConfig(kind="slurm", **keys)


def batch(of: LauncherConfig, root: Path = Path("/w/runs"), runs: int = 1, **keys: Any) -> Batch:
    folders = tuple(root / f"run{n}" for n in range(runs))
    return Batch(
        root / "submissions" / "q-1", "q-1", folders, of, root / "snapshots" / "0a", **keys
    )


def srun(text: str) -> list[str]:
    """The command that starts the ranks."""
    (line,) = (line for line in text.splitlines() if line.startswith("srun --unbuffered"))
    return shlex.split(line)
