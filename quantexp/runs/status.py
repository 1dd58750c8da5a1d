"""status.json: the run status, replaced atomically so that a reader never sees a partial file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from quantexp.errors import RunError

#: The reason of a run interrupted by Ctrl-C or by the end of its parent process.
INTERRUPTED = "interrupted"


class State(StrEnum):
    """The state of a run."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"


class Phase(StrEnum):
    """The current activity of a run in state `running`; status.json holds these values."""

    #: The run has not started, or has ended.
    NONE = ""
    #: Importing torch and Megatron.
    IMPORTING = "importing"
    READING_DATA = "reading the data"
    BUILDING = "building the model"
    TRAINING = "training"
    #: An iteration that checks the operands where they reach the matrix products.
    PROVING = "proving the precision map"
    CAPTURING = "capturing"
    EVALUATING = "evaluating"
    SAVING = "saving the model"
    #: Training is over; captured tensors are still being written.
    WRITING = "writing"
    DRAWING = "drawing"


@dataclass
class Status:
    """The content of status.json; times are UTC in ISO 8601."""

    state: State = State.PENDING
    #: The reason of the state, in one line; empty unless something is wrong.
    reason: str = ""
    #: The current activity.
    phase: Phase = Phase.NONE
    #: The time at which the current phase, iteration or micro-batch began.
    phase_since: str | None = None
    #: The current iteration, from 1, and its current micro-batch; None before the first.
    current_iteration: int | None = None
    micro_batch: int | None = None
    #: The number of micro-batches of an iteration.
    micro_batches: int | None = None
    created: str = ""
    started: str | None = None
    updated: str | None = None
    finished: str | None = None
    #: The last complete iteration.
    iteration: int = 0
    iterations: int = 0
    host: str | None = None
    pid: int | None = None
    #: The kind of the launcher that started the run.
    launcher: str | None = None
    #: The scheduler's job id; SLURM's is 123, or 123_4 in an array.
    job_id: str | None = None
    #: The name of the submission: the SLURM job name, and the folder in `runs/submissions/`.
    submission: str | None = None
    #: The index of the run in the submission's list of runs.
    task: int | None = None
    #: One entry for each requeue: its time, its reason and the iteration that was reached.
    restarts: list[dict[str, Any]] = field(default_factory=list)
    #: The number of captured tensors, their bytes, and the last one.
    capture: dict[str, Any] = field(default_factory=dict)
    #: For each tracker: the run's address, its id there, the last iteration delivered, and the error if any.
    tracking: dict[str, dict[str, Any]] = field(default_factory=dict)


def now() -> str:
    """The current time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_json(file: Path, content: object) -> None:
    """Write a JSON file atomically."""
    write_whole(file, json.dumps(content, indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically: to a temporary name beside it, then rename; an error leaves no temporary file."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_status(file: Path, status: Status) -> None:
    """Replace status.json."""
    status.updated = now()
    write_json(file, asdict(status))


def read_status(file: Path) -> Status | None:
    """The status; None if the file does not exist.

    Raises:
        RunError: the file cannot be read, or is not a status.
    """
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    try:
        return Status(**{**content, "state": State(content["state"]), "phase": _phase(content)})
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} is not a status of this version: {error}") from error


def _phase(content: dict[str, Any]) -> Phase:
    """The phase; a value that only another version of quantexp knows becomes `NONE`."""
    value = str(content.get("phase", ""))
    return Phase(value) if value in list(Phase) else Phase.NONE


def finish(status: Status, state: State, reason: str) -> None:
    """Set a status to the end of a run: no current phase, iteration or pending captures."""
    status.state, status.reason, status.finished = state, reason, now()
    status.phase, status.phase_since, status.current_iteration = Phase.NONE, None, None
    status.micro_batch = None
    if status.capture:
        status.capture |= {"queue_bytes": 0, "bytes_per_s": 0.0}


def read_json(file: Path) -> Any:
    """A JSON file of a run folder.

    Raises:
        RunError: it is missing or broken.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
