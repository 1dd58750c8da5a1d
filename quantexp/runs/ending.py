"""How a run ended that could not say so itself, or only what one of its ranks saw of it: written into its status."""

from __future__ import annotations

import signal
from pathlib import Path

from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import account
from quantexp.runs.status import INTERRUPTED, State, Status, now, over, read_status, write_status

#: What a rank of a job says that was asked to end: it cannot know why.
ENDED_FROM_OUTSIDE = "ended from outside"


def conclude(run: RunDir, state: State, reason: str) -> None:
    """Say how a run ended."""
    status = read_status(run.status) or Status(created=now())
    over(status, state, reason)
    run.reserve.unlink(missing_ok=True)
    write_status(run.status, status)


def interrupted(run: RunDir, num_processes: int) -> None:
    """Cancelled, unless it was over already. Of several ranks, one may have "failed" only because others were ended."""
    status = read_status(run.status)
    over = {State.COMPLETED, State.CANCELLED} | ({State.FAILED} if num_processes == 1 else set())
    if status is None or status.state not in over:
        conclude(run, State.CANCELLED, INTERRUPTED)


def on_purpose(run: RunDir) -> None:
    """Cancelled, and not for another process to take over."""
    conclude(run, State.CANCELLED, "cancelled while its sweep went on")


def ended(run: RunDir, num_processes: int, code: int) -> None:
    """A worker that was killed could not say so itself; of several, the one that ended first is the reason."""
    if num_processes > 1:
        if code:
            conclude(run, *_accounted(run, num_processes, code))
        return
    status = read_status(run.status)
    if status is None or status.state in (State.RUNNING, State.PENDING):
        conclude(run, State.FAILED, _without_a_word(code, run.rank_log(0)))


def _accounted(run: RunDir, num_processes: int, code: int) -> tuple[State, str]:
    """The ranks' own account; but where torchrun was killed, they were ended for that alone."""
    state, reason = account(run, num_processes)
    if state is State.CANCELLED and code == -signal.SIGKILL:
        return State.FAILED, f"torchrun {_by_signal(code)}; see {run.torchrun_log}"
    return state, reason


def _without_a_word(code: int, log: Path) -> str:
    if code >= 0:
        return f"the worker ended with exit code {code} and no reason; see {log}"
    return f"the worker {_by_signal(code)}; see {log}"


def _by_signal(code: int) -> str:
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
