"""`runs/sweeps/<time>_<pid>.json`: the runs of a sweep with their configurations."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantexp.errors import RunError
from quantexp.runs.paths import RunsRoot
from quantexp.runs.status import write_json


def sweep_file(root: Path, started: str) -> Path:
    """The path of this process's list of a sweep that started at this time (UTC, ISO 8601)."""
    stamp = datetime.fromisoformat(started).astimezone(UTC).strftime("%Y%m%d_%H%M%S_%f")
    return RunsRoot(root).sweeps / f"{stamp}_{os.getpid()}.json"


def write_sweep(file: Path, content: dict[str, Any]) -> None:
    """Replace the sweep's list.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, content)
    except OSError as error:
        raise cannot_write(file, error) from error


def cannot_write(file: Path, error: OSError) -> RunError:
    """The error for a sweep's list, or its lock, in a folder that cannot be written."""
    return RunError(
        f"the sweep's list of runs cannot be written to {file.parent}: {error.strerror}; set paths.root to a folder "
        "that can"
    )
