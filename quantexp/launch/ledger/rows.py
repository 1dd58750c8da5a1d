"""The output of `quantexp status --json`: one object for each run, always with the same keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantexp.launch.backend import Standing
from quantexp.model.checkpoints import next_iteration
from quantexp.runs.find import Missing
from quantexp.runs.paths import RunDir
from quantexp.runs.status import MISSING, UNREADABLE, State, Status


def status_rows(
    standings: Sequence[Standing], missing: Sequence[Missing] = ()
) -> list[dict[str, object]]:
    """One object for each run; a run without a folder has null values except name, state and reason."""
    nulls = dict.fromkeys(_row(Standing(RunDir(Path()), None)))
    missing_rows = [
        {**nulls, "run": run.name, "state": MISSING, "alive": False, "reason": run.reason}
        for run in missing
    ]
    return [_row(standing) for standing in standings] + missing_rows


def state_word(standing: Standing) -> str:
    """The state as shown to the user."""
    if standing.state is None or standing.damage:
        return UNREADABLE
    return standing.state.value


def reason(standing: Standing) -> str:
    """Why a run is unreadable, why it ended, or why it was requeued."""
    return standing.damage or standing.reason


def goes_on_at(standing: Standing) -> int | None:
    """The iteration at which an unfinished run that has ended goes on from its checkpoint; None without one."""
    unfinished = standing.state in (State.FAILED, State.PREEMPTED, State.CANCELLED)
    if standing.alive or not unfinished:
        return None
    first = next_iteration(standing.run)
    return first if first > 1 else None


def _captured(status: Status) -> dict[str, object] | None:
    """The captures of a run, always with the same keys; None if there are none."""
    captured = status.capture
    if not captured:
        return None
    counts = ("tensors", "num_bytes", "queue_bytes", "bytes_per_s", "waited_s")
    return {
        **{name: captured.get(name, 0) for name in counts},
        "stopped": captured.get("stopped", ""),
    }


def _row(standing: Standing) -> dict[str, object]:
    status, job = standing.status, standing.job
    return {
        "run": standing.run.root.name,
        "path": str(standing.run.root),
        "state": state_word(standing),
        "alive": standing.alive,
        "reason": reason(standing),
        "where": standing.where,
        "note": standing.note or standing.pace.early_end or None,
        "phase": status.phase.value,
        "phase_since": status.phase_since,
        "current_iteration": status.current_iteration,
        "micro_batch": status.micro_batch,
        "iteration": status.iteration,
        "iterations": status.iterations,
        "loss": standing.pace.loss,
        "tokens_per_s": standing.pace.tokens_per_s,
        "capture": _captured(status),
        "skipped": status.skipped,
        "nonfinite": status.nonfinite,
        "dossiers": status.dossiers,
        "time_left_s": standing.pace.time_left_s if standing.state is State.RUNNING else None,
        "host": status.host,
        "pid": status.pid,
        "job_id": job.id if job is not None else status.job_id,
        "submission": status.submission,
        "goes_on_at": goes_on_at(standing),
        "restarts": max(len(status.restarts), job.restarts if job is not None else 0),
        "created": status.created,
        "started": status.started,
        "updated": status.updated,
        "finished": status.finished,
    }
