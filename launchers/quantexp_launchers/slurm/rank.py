"""One rank of a job: its worker in a child, watched from outside, because srun cannot see that it makes no progress.

The child is a fork, so the worker needs no command of its own and keeps this process's group and open files. Signals
that end a process reach the child; it also ends when this process does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from types import FrameType

from quantexp.config.load import read
from quantexp.processes.silence import Watch
from quantexp.processes.with_parent import end_with_parent
from quantexp.runs.fencing import is_ours
from quantexp.runs.outcome import UnresponsiveError, by_signal, record_unresponsive_rank
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import RANK_MAY_WAIT, record_silent_end
from quantexp.runs.status import now
from quantexp.schema import LauncherConfig
from quantexp.training.log import LOG

#: The range of rendezvous ports, one for each job; it ends below 32768, where ephemeral ports start.
FIRST_PORT, NUM_PORTS = 20000, 12000
#: Grace period of a silent worker, seconds, in which it writes its state before it is killed.
GRACE_S = 20.0


def run_rank(run: RunDir, environment: MutableMapping[str, str]) -> int:
    """Run one rank and return the exit code; the ranks meet at the job's first host."""
    from submitit import JobEnvironment

    job = JobEnvironment()
    environment.update(
        RANK=str(job.global_rank),
        WORLD_SIZE=str(job.num_tasks),
        LOCAL_RANK=str(job.local_rank),
        MASTER_ADDR=job.hostnames[0],
        MASTER_PORT=str(rendezvous_port(int(job.raw_job_id))),
    )

    def work() -> int:
        from quantexp.training import worker

        return worker.main([str(run.root), "--in-job"])

    return _watched(run, read(run.config).launcher, job.global_rank, work)


def _watched(run: RunDir, launcher: LauncherConfig, rank: int, work: Callable[[], int]) -> int:
    """Run the worker in a child; ends it, and records why, if it makes no progress for `launcher.timeout_min`."""

    def look(child: int) -> Callable[[], None]:
        may_wait = 1.0 if launcher.num_processes == 1 else RANK_MAY_WAIT
        watch = Watch(child, launcher.timeout_min * 60, may_wait=may_wait)

        def once() -> None:
            if (silence := watch.look()) is not None:
                error = UnresponsiveError(run, rank, silence, launcher.timeout_min)
                LOG.error(error)
                end_child(child, GRACE_S)
                raise error

        return once

    try:
        code = run_in_child(work, look)
    except UnresponsiveError as error:
        if is_ours(run):
            record_unresponsive_rank(run, launcher.num_processes, error)
        return 1
    if code < 0 and launcher.num_processes > 1 and is_ours(run):
        record_silent_end(run, rank, by_signal(code), now())
    return end_like(code)


def rendezvous_port(job_id: int) -> int:
    """The rendezvous port of a job; two jobs on one node have different ports."""
    return FIRST_PORT + job_id % NUM_PORTS


#: Seconds between two looks at the child.
POLL_S = 0.2
#: Signals that are passed on.
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_in_child(work: Callable[[], int], look: Callable[[int], Callable[[], None]]) -> int:
    """Run the work in a child and return its exit code, negative for a signal (as `subprocess`).

    Args:
        work: returns the exit code; called while this process has only one thread.
        look: gets the child's process id and returns what is called several times a second meanwhile; an exception of
            that ends the waiting, and is raised here. It has to end the child (`end_child`).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until they can be passed on
    child = os.fork()
    if child == 0:
        _become(work, parent, blocked)
    handlers = {number: signal.getsignal(number) for number in _FORWARDED}

    def forward(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)

    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        watch = look(child)
        while (status := _ended(child)) is None:
            watch()
            time.sleep(POLL_S)
        return os.waitstatus_to_exitcode(status)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _become(work: Callable[[], int], parent: int, mask: set[int]) -> None:
    """Do the work in the child under this signal mask, and leave."""
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # here, as a handler may raise
        end_with_parent(parent)
        code = work()
    except BaseException:  # noqa: BLE001  (no code of the parent may run in the child)
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _ended(child: int) -> int | None:
    """The child's wait status; None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return status if pid else None


def end_child(child: int, grace_s: float) -> None:
    """Ask a child to end, also a stopped one, and kill it after the grace period; its status stays to be read."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        os.kill(child, number)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(POLL_S)
    os.kill(child, signal.SIGKILL)


def end_like(code: int) -> int:
    """The exit code for this process; ends it by the same signal if one ended the child."""
    if code < 0:
        if code != -signal.SIGKILL:  # which has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(POLL_S)
    return code if code >= 0 else 128 - code
