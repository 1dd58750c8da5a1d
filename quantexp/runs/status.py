"""status.json: the run status, replaced atomically so that a reader never sees a partial file."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

from quantexp.reading import json_files
from quantexp.reading.typed import REQUIRED, Count, Like, Rule
from quantexp.runs.disk import write_whole
from quantexp.runs.redaction import redacted_text

#: The words for a run whose status cannot be read, and for a run without a folder, in the place of a state.
UNREADABLE, MISSING = "unreadable", "missing"
#: The reason of a folder without status.json.
NEVER_STARTED = "it has no status.json: it was never started"
#: An escape of JSON; of the two halves of a character, both together.
_ESCAPE = re.compile(r"\\(?:ud[89ab]\w\w\\ud[c-f]\w\w|(?P<half>ud[89a-f]\w\w)|.)")
#: Bytes of status.json.
MOST_BYTES = 1 << 22
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
    #: The rest of an iteration that was proved or captured: the passes are complete.
    STEPPING = "optimizer step"
    EVALUATING = "evaluating"
    TASKS = "running tasks"
    SAVING = "saving the model"
    #: Training is over; captured tensors are still being written.
    WRITING = "writing"
    DRAWING = "drawing"

    @classmethod
    def _missing_(cls, value: object) -> Phase:
        """`NONE` for a value that only another version of quantexp knows."""
        return cls.NONE


def instant(text: str) -> datetime:
    """A time in ISO 8601; one without a zone is in UTC."""
    time = datetime.fromisoformat(text)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _is_time(text: str) -> bool:
    try:
        instant(text)
    except ValueError:
        return False
    return True


#: A time that `instant` reads.
Time = Annotated[str, Rule("a time such as 2026-01-31T12:00:00+00:00", _is_time)]
_CreationTime = Annotated[str, Rule("a time, or empty", lambda text: not text or _is_time(text))]


class Capturing(TypedDict, total=False):
    """`quantexp.capture.record.progress.Progress`."""

    tensors: Count
    num_bytes: Count
    current: str
    stopped: str
    queue_bytes: Count
    bytes_per_s: float
    waited_s: float


class Delivered(TypedDict, total=False):
    """What a tracker has received."""

    where: Required[str]
    id: str | None
    iteration: Required[Count]
    ended: bool
    trouble: Required[str]


class Restart(TypedDict, total=False):
    """A start of the run after an end from outside."""

    time: str
    #: Why the start before it ended, and the last iteration that it completed.
    reason: str
    iteration: Count
    #: The checkpoint that the run goes on from; None if it begins again.
    goes_on_from: Count | None
    #: The iterations that are computed again.
    lost: Count
    #: Whether the scheduler started it, and not the user.
    requeued: bool
    #: What is not as at the start before it: the number of processes, the layout, the source.
    changed: list[str]


@dataclass
class Status:
    """The content of status.json; times are UTC in ISO 8601."""

    state: State = field(default=State.PENDING, metadata=REQUIRED)
    #: The reason of the state, in one line; empty unless something is wrong.
    reason: str = ""
    #: The current activity.
    phase: Phase = Phase.NONE
    #: The time at which the current phase, iteration or micro-batch began.
    phase_since: Time | None = None
    #: The current iteration, from 1, and its current micro-batch; None before the first.
    current_iteration: Count | None = None
    micro_batch: Count | None = None
    #: The number of micro-batches of an iteration.
    micro_batches: Count | None = None
    created: _CreationTime = ""
    started: str | None = None
    updated: Time | None = None
    finished: Time | None = None
    #: The time at which training was complete, with all that it records; figures and the report follow.
    trained: Time | None = None
    #: The last complete iteration.
    iteration: Count = 0
    iterations: Count = 0
    host: str | None = None
    pid: Annotated[int, Rule("a process id", lambda pid: 0 < pid < 1 << 31)] | None = None
    #: The kind of the launcher that started the run.
    launcher: str | None = None
    #: The scheduler's job id; SLURM's is 123, or 123_4 in an array.
    job_id: str | None = None
    #: The name of the submission: the SLURM job name, and the folder in `runs/submissions/`.
    submission: str | None = None
    #: The index of the run in the submission's list of runs.
    task: Count | None = None
    #: The folder that the submitted job writes, an absolute path; a copy of the folder records that of the original.
    folder: str | None = None
    #: The iteration of the run's own checkpoint that the last start goes on from; None if it begins at the first one.
    goes_on_from: Count | None = None
    #: One entry for each start of this attempt after the first.
    restarts: Annotated[list[dict[str, Any]], Like(list[Restart])] = field(default_factory=list)
    #: The number of captured tensors, their bytes, and the last one.
    capture: Annotated[dict[str, Any], Like(Capturing)] = field(default_factory=dict)
    #: Steps that were left out, and why the last one was, with its iteration.
    skipped: Count = 0
    nonfinite: str = ""
    #: The iterations after which a dossier was written.
    dossiers: list[Count] = field(default_factory=list)
    #: For each tracker: the run's address, its id there, the last iteration delivered, and the error if any.
    tracking: Annotated[dict[str, dict[str, Any]], Like(dict[str, Delivered])] = field(
        default_factory=dict
    )


def now() -> str:
    """The current time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_json(file: Path, content: object, *, is_durable: bool = False) -> None:
    """Write a JSON file atomically; see `write_whole`.

    Half of a surrogate pair, as in a word of the command line that is not UTF-8, becomes its code in letters: no JSON
    reader has to take it.
    """
    text = _ESCAPE.sub(_whole_escape, json.dumps(content, indent=1))
    write_whole(file, text + "\n", is_durable=is_durable)


def _whole_escape(escape: re.Match[str]) -> str:
    return escape[0] if escape["half"] is None else rf"\\{escape['half']}"


def requeues(status: Status) -> list[dict[str, Any]]:
    """The starts by the scheduler since the user's last one."""
    restarts = reversed(status.restarts)
    return list(itertools.takewhile(lambda each: each.get("requeued", True), restarts))[::-1]


def write_status(file: Path, status: Status) -> None:
    """Replace status.json; the last one, with the run's end, is durable."""
    status.updated = now()
    write_json(file, asdict(status), is_durable=status.finished is not None)


def read_status(file: Path) -> Status | None:
    """The status; None if the file does not exist.

    Raises:
        UnreadableError: the file cannot be read, or is not a status.
    """
    try:
        return json_files.read_json(file, Status, MOST_BYTES)
    except FileNotFoundError:
        return None


def end_of(status: Status, state: State, reason: str) -> tuple[State, str]:
    """The state and reason of a run's end: a run is completed if its training was, whatever ended it after that."""
    if status.trained is None or state is State.COMPLETED:
        return state, reason
    words = f"training is complete; after it: {reason}"
    return State.COMPLETED, f"{words}; quantexp draw and quantexp report make what is missing"


def finish(status: Status, state: State, reason: str) -> None:
    """Set a status to the end of a run: no current phase, iteration or pending captures; the reason has no secrets."""
    state, reason = end_of(status, state, reason)
    status.state, status.reason, status.finished = state, redacted_text(reason), now()
    status.phase, status.phase_since, status.current_iteration = Phase.NONE, None, None
    status.micro_batch = None
    if status.capture:
        status.capture |= {"queue_bytes": 0, "bytes_per_s": 0.0}


def read_json(file: Path) -> Any:
    """A JSON file of a run folder, of any content.

    Raises:
        UnreadableError: it is missing or damaged.
    """
    return json_files.require_json(file, object)
