"""The launcher's record of a run's end, for runs whose workers were killed or know only a part of the cause."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from quantexp.processes.silence import Silence
from quantexp.runs.disk import write_whole
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import ENDED_SILENTLY, end_record, outcome_of_ranks, write_record
from quantexp.runs.status import (
    INTERRUPTED,
    State,
    Status,
    finish,
    now,
    read_status,
    write_status,
)

#: The reason that a rank of a job records on SIGTERM: it cannot know who sent the signal.
ENDED_FROM_OUTSIDE = "ended from outside"
#: The reason that a run records which ended itself before its job would have been ended.
SAVED_BEFORE_LIMIT = "saved a checkpoint before the time limit"


class UnresponsiveError(Exception):
    """A process of a run makes no progress; the message says what was seen, and where the run was."""

    def __init__(self, run: RunDir, rank: int | None, silence: Silence, timeout_min: float) -> None:
        #: None for torchrun.
        self.rank = rank
        self.seen = now()
        status = read_status(run.status) or Status()
        #: Whether the run had recorded its end before.
        self.after_end = status.finished is not None
        super().__init__(
            f"no progress for {silence.seconds:.0f} s (launcher.timeout_min={timeout_min:g}) "
            f"{_place(status)}; {silence}"
        )


def _place(status: Status) -> str:
    """`at iteration 3, micro-batch 2`, `while importing`; another rank may have recorded an end before."""
    if status.finished is not None:
        is_over = status.trained is not None or status.iteration == 0
        return "after its end" if is_over else f"after iteration {status.iteration}"
    if status.current_iteration is not None:
        part = f", micro-batch {status.micro_batch}" if (status.micro_batches or 1) > 1 else ""
        return f"at iteration {status.current_iteration}{part}"
    return f"while {status.phase.value}" if status.phase else "before it started"


def record_unresponsive(run: RunDir, num_processes: int, error: UnresponsiveError) -> None:
    """Record the end of a run whose process made no progress and was ended; an end that the run recorded stays."""
    if error.rank is None:  # torchrun
        record_end(run, State.FAILED, f"torchrun: {error}")
        return
    record_unresponsive_rank(run, num_processes, error)
    if num_processes > 1:
        record_exit(run, num_processes, 1)


def record_unresponsive_rank(run: RunDir, num_processes: int, error: UnresponsiveError) -> None:
    """Record the end of a rank that made no progress; of several, in the rank's own record."""
    if num_processes > 1:
        assert error.rank is not None
        write_record(run, error.rank, end_record(State.FAILED, str(error), finished=error.seen))
    elif not error.after_end:
        record_end(run, State.FAILED, str(error))


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


def announce_kill(run: RunDir, reason: str) -> None:
    """Tell the process that waits for a run's worker why the worker is about to be killed."""
    with contextlib.suppress(
        OSError
    ):  # the worker is killed all the same, and its end recorded as a failure
        write_whole(run.kill, reason)


def _reason_of_kill(run: RunDir) -> str | None:
    try:
        return run.kill.read_text()
    except OSError:
        return None


def record_exit(run: RunDir, num_processes: int, code: int) -> None:
    """Record the end of a run whose worker was killed; with several ranks, the first that failed gives the reason."""
    killed = _reason_of_kill(run)
    if num_processes > 1:
        if code:
            state, reason = _outcome_of_ranks(run, num_processes, code)
            is_killed = killed is not None and state is not State.COMPLETED
            record_end(run, *((State.CANCELLED, str(killed)) if is_killed else (state, reason)))
        return
    status = read_status(run.status)
    if status is None or status.state in (State.RUNNING, State.PENDING):
        if killed is not None:
            record_end(run, State.CANCELLED, killed)
            return
        record_end(run, State.FAILED, _unrecorded_reason(code, run.rank_log(0)))


def _outcome_of_ranks(run: RunDir, num_processes: int, code: int) -> tuple[State, str]:
    """The outcome that the ranks recorded, unless SIGKILL of torchrun was what ended them, with or without a record."""
    state, reason = outcome_of_ranks(run, num_processes)
    is_consequence = state is State.CANCELLED or ENDED_SILENTLY in reason.partition("\n")[0]
    if is_consequence and code == -signal.SIGKILL:
        return State.FAILED, f"torchrun {by_signal(code)}; see {run.torchrun_log}"
    return state, reason


def _unrecorded_reason(code: int, log: Path) -> str:
    if code >= 0:
        return f"the worker ended with exit code {code} and no reason; see {log}"
    return f"the worker {by_signal(code)}; see {log}"


def by_signal(code: int) -> str:
    """`was ended by SIGKILL (out of memory?)`, of a negative exit code."""
    name = signal_name(-code)
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
