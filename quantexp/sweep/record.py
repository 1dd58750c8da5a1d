"""`runs/sweeps/<time>.json`: the runs that a sweep consists of, each with the configuration that makes it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantexp.errors import RunError
from quantexp.paths import RunsRoot
from quantexp.status import write_json


def sweep_file(root: Path, started: str) -> Path:
    """Where the list of a sweep that started then (UTC, ISO 8601) is kept."""
    stamp = datetime.fromisoformat(started).astimezone(UTC).strftime("%Y%m%d_%H%M%S_%f")
    return RunsRoot(root).sweeps / f"{stamp}.json"


def write_sweep(root: Path, started: str, runs: Sequence[dict[str, Any]]) -> Path:
    """Replace the list.

    Raises:
        RunError: the folder cannot be written.
    """
    file = sweep_file(root, started)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"started": started, "runs": list(runs)})
    except OSError as error:
        raise RunError(
            f"the sweep's list of runs cannot be written to {file.parent}: {error.strerror}; set paths.root to a "
            "folder that can"
        ) from error
    return file
