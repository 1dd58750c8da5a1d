"""status.json: the state of a run, replaced as a whole so that a reader never sees half of it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from quantexp.errors import RunError

#: The reason of a run whose end was not meant for it: a Ctrl-C, or the end of the process that started it.
INTERRUPTED = "interrupted"


class State(StrEnum):
    """Where a run is in its life."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"


class Phase(StrEnum):
    """What a running run does now; the values are what status.json holds."""

    #: It has not begun, or has ended.
    NONE = ""
    #: Python imports torch and Megatron.
    IMPORTING = "importing"
    READING_DATA = "reading the data"
    BUILDING = "building the model"
    TRAINING = "training"
    #: An iteration in which operands are looked at where they reach the matrix products.
    PROVING = "proving the precision map"
    CAPTURING = "capturing"
    EVALUATING = "evaluating"
    SAVING = "saving the model"
    #: Training is over, and what was captured is still being written.
    WRITING = "writing"
    DRAWING = "drawing"


@dataclass
class Status:
    """What status.json holds; times are UTC in ISO 8601."""

    state: State = State.PENDING
    #: Why it ended, in one line; empty while nothing is wrong.
    reason: str = ""
    #: What it does now.
    phase: Phase = Phase.NONE
    #: Since when it does that: the time at which the phase, the iteration or the micro-batch below began.
    phase_since: str | None = None
    #: The iteration that is being computed, from 1, and the micro-batch of it; None before the first.
    current_iteration: int | None = None
    micro_batch: int | None = None
    #: Micro-batches of an iteration.
    micro_batches: int | None = None
    created: str = ""
    started: str | None = None
    updated: str | None = None
    finished: str | None = None
    #: The last iteration that is complete.
    iteration: int = 0
    iterations: int = 0
    host: str | None = None
    pid: int | None = None
    #: SLURM's id of the job: 123, or 123_4 in an array.
    job_id: str | None = None
    #: The name of its submission: SLURM's job name, and the folder in `runs/submissions/`.
    submission: str | None = None
    #: Its place in the submission's list of runs.
    task: int | None = None
    #: How often the scheduler started it again, each with its time, reason and the iteration that was reached.
    restarts: list[dict[str, Any]] = field(default_factory=list)
    #: Tensors captured, their bytes, and the last one.
    capture: dict[str, Any] = field(default_factory=dict)
    #: For each tracker where it keeps the run, its id of it, the last iteration it has, and what is wrong with it.
    tracking: dict[str, dict[str, Any]] = field(default_factory=dict)


def now() -> str:
    """The time, UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_json(file: Path, content: object) -> None:
    """Write beside, then rename: whole or not at all."""
    write_whole(file, json.dumps(content, indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write beside, then rename; on an error nothing stays."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_status(file: Path, status: Status) -> None:
    """Replace status.json."""
    status.updated = now()
    write_json(file, asdict(status))


def read_status(file: Path) -> Status | None:
    """The status, or None where there is none.

    Raises:
        RunError: the file is not a status.
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
    """The phase; a word of another version of ours is none."""
    value = str(content.get("phase", ""))
    return Phase(value) if value in list(Phase) else Phase.NONE


def over(status: Status, state: State, reason: str) -> None:
    """Make it the status of a run that has ended: nothing goes on and nothing waits."""
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
