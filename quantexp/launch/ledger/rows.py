"""`quantexp status --json`: one object a run, the same keys in each; a program may rely on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantexp.launch.ledger.standing import Standing
from quantexp.runs.find import Missing
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status

#: The state of a run whose folder does not say, and of one that has no folder.
UNREADABLE, MISSING = "unreadable", "missing"


def status_rows(
    found: Sequence[Standing], missing: Sequence[Missing] = ()
) -> list[dict[str, object]]:
    """One object a run; the values of a run without a folder are null, but for its name, state and reason."""
    nothing = dict.fromkeys(_row(Standing(RunDir(Path()), None)))
    gone = [
        {**nothing, "run": each.name, "state": MISSING, "alive": False, "reason": each.reason}
        for each in missing
    ]
    return [_row(each) for each in found] + gone


def state_word(found: Standing) -> str:
    """The state as it is shown."""
    return found.state.value if found.state is not None else UNREADABLE


def _captured(status: Status) -> dict[str, object] | None:
    """What has been captured; the same keys in each, None where nothing is."""
    captured = status.capture
    if not captured:
        return None
    counts = ("tensors", "num_bytes", "queue_bytes", "bytes_per_s", "waited_s")
    return {
        **{name: captured.get(name, 0) for name in counts},
        "stopped": captured.get("stopped", ""),
    }


def _row(found: Standing) -> dict[str, object]:
    status, job = found.status, found.job
    return {
        "run": found.run.root.name,
        "path": str(found.run.root),
        "state": state_word(found),
        "alive": found.alive,
        "reason": found.reason,
        "where": found.where,
        "note": found.note,
        "phase": status.phase.value,
        "phase_since": status.phase_since,
        "current_iteration": status.current_iteration,
        "micro_batch": status.micro_batch,
        "iteration": status.iteration,
        "iterations": status.iterations,
        "loss": found.pace.loss,
        "tokens_per_s": found.pace.tokens_per_s,
        "capture": _captured(status),
        "time_left_s": found.pace.time_left_s if found.state is State.RUNNING else None,
        "host": status.host,
        "pid": status.pid,
        "job_id": job.id if job is not None else status.job_id,
        "submission": status.submission,
        "restarts": max(len(status.restarts), job.restarts if job is not None else 0),
        "created": status.created,
        "started": status.started,
        "updated": status.updated,
        "finished": status.finished,
    }
