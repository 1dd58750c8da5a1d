"""The lists of runs: of a sweep, `runs/sweeps/<time>_<pid>.json`, and of a submission to SLURM, its `tasks.json`."""

from __future__ import annotations

import contextlib
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

from quantexp.errors import RunError
from quantexp.reading.json_files import require_json
from quantexp.reading.typed import Count, Rule
from quantexp.runs.paths import RunsRoot, Submission
from quantexp.runs.provenance import RecordedSource
from quantexp.runs.status import write_json


def _is_name(text: str) -> bool:
    return text not in ("", ".", "..") and not {"/", "\0"} & set(text)


class SweepRow(TypedDict, total=False):
    """A run of a sweep."""

    #: The name of its folder; None if it never had one.
    run: Required[Annotated[str, Rule("the name of a folder", _is_name)] | None]
    state: str
    skipped: bool
    reason: str | None
    stage: Count
    config: dict[str, Any] | None


class SweepList(TypedDict, total=False):
    """The content of a sweep's list."""

    started: str
    finished: str | None
    host: str
    pid: int
    command: list[str]
    source: RecordedSource
    runs: Required[list[SweepRow]]


class Tasks(TypedDict, total=False):
    """The content of a submission's tasks.json."""

    #: The paths of the run folders, in the order of the tasks.
    runs: Required[list[Annotated[str, Rule("a path", lambda text: text and "\0" not in text)]]]
    snapshot: Required[str]
    umask: Required[Annotated[int, Rule("a umask", lambda mask: 0 <= mask <= 0o777)]]


def read_sweep(file: Path) -> SweepList:
    """A sweep's list.

    Raises:
        UnreadableError: names the file and what is wrong with it.
    """
    return require_json(file, SweepList)


def read_tasks(submission: Submission) -> Tasks:
    """The runs of a submission.

    Raises:
        UnreadableError: names the file and what is wrong with it.
    """
    return require_json(submission.tasks, Tasks)


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
        make_shared(file.parent)
        write_json(file, content)
    except OSError as error:
        raise cannot_write(file, error) from error


def make_shared(folder: Path) -> None:
    """Make a folder that all users of its parent may write.

    Raises:
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        parent = folder.parent.stat().st_mode
        if parent & 0o022:
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IMODE(parent))


def cannot_write(file: Path, error: OSError) -> RunError:
    """The error for a sweep's list, or its lock, in a folder that cannot be written."""
    return RunError(
        f"the sweep's list of runs cannot be written to {file.parent}: {error.strerror}; set paths.root to a folder "
        "that can"
    )
