"""The launcher's record of a run's end, for runs whose workers were killed or know only a part of the cause."""

from __future__ import annotations

import signal
from pathlib import Path

from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import outcome_of_ranks
from quantexp.runs.status import INTERRUPTED, State, Status, finish, now, read_status, write_status

#: The reason that a rank of a job records on SIGTERM: it cannot know who sent the signal.
ENDED_FROM_OUTSIDE = "ended from outside"


def record_end(run: RunDir, state: State, reason: str) -> None:
    """Write state and reason of the run's end to status.json, and release the reserved disk space."""
    status = read_status(run.status) or Status(created=now())
    finish(status, state, reason)
    run.reserve.unlink(missing_ok=True)
    write_status(run.status, status)


def record_interruption(run: RunDir, num_processes: int) -> None:
    """Record the run as cancelled, unless it had ended before.

    With several ranks, `failed` is overwritten too: one rank may have failed only because others were ended.
    """
    status = read_status(run.status)
    final = {State.COMPLETED, State.CANCELLED} | ({State.FAILED} if num_processes == 1 else set())
    if status is None or status.state not in final:
        record_end(run, State.CANCELLED, INTERRUPTED)


def record_cancellation(run: RunDir) -> None:
    """Record the run as cancelled by the user, so that no other process takes it over."""
    record_end(run, State.CANCELLED, "cancelled while its sweep went on")


def record_exit(run: RunDir, num_processes: int, code: int) -> None:
    """Record the end of a run whose worker was killed; with several ranks, the first that failed gives the reason."""
    if num_processes > 1:
        if code:
            record_end(run, *_outcome_of_ranks(run, num_processes, code))
        return
    status = read_status(run.status)
    if status is None or status.state in (State.RUNNING, State.PENDING):
        record_end(run, State.FAILED, _unrecorded_reason(code, run.rank_log(0)))


def _outcome_of_ranks(run: RunDir, num_processes: int, code: int) -> tuple[State, str]:
    """The outcome that the ranks recorded, unless SIGKILL of torchrun was what cancelled them."""
    state, reason = outcome_of_ranks(run, num_processes)
    if state is State.CANCELLED and code == -signal.SIGKILL:
        return State.FAILED, f"torchrun {_by_signal(code)}; see {run.torchrun_log}"
    return state, reason


def _unrecorded_reason(code: int, log: Path) -> str:
    if code >= 0:
        return f"the worker ended with exit code {code} and no reason; see {log}"
    return f"the worker {_by_signal(code)}; see {log}"


def _by_signal(code: int) -> str:
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
