"""Runs the workers of a prepared run folder on this machine, as child processes.

The folder is a worker's only input. The worker's output goes to the folder's log; the caller reads its progress from
the folder. With one process, Ctrl-C reaches the whole process group: the worker ends itself as cancelled, and this
module waits for it. With several processes, torchrun starts and monitors them in their own session, with a rendezvous
file instead of a port, and ends all of them when one fails. No rank outlives its run: if this process is killed, the
kernel ends the worker, or torchrun, which ends its ranks.

The process that started the workers also watches them. A rank that only waits for another gets twice
`launcher.timeout_min`: its own wait ends after once that time, and its error then says whom it waited for. torchrun
does nothing but wait; it counts as silent only while it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from quantexp.processes import with_parent
from quantexp.processes.silence import Watch
from quantexp.runs.outcome import UnresponsiveError
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import ENDED_SILENTLY, RANK_MAY_WAIT, RENDEZVOUS, record_silent_end
from quantexp.runs.status import now, read_status
from quantexp.schema import LauncherConfig
from quantexp_launchers.local.warm import WarmRank, WarmStart

#: Makes a worker end when its parent process ends for any reason.
WITH_PARENT = "--with-parent"
#: Seconds between two polls of a running worker.
POLL_S = 0.1
#: Grace period of an interrupted worker, in which it writes its state before it is killed.
GRACE_S = 20.0


def _nothing(grace_s: float) -> None:
    """The default `on_stop`."""


def command(run_dir: Path, num_processes: int = 1) -> list[str]:
    """The command that starts the worker of a prepared run folder, or torchrun with its workers."""
    worker = ["-m", "quantexp.training.worker", str(run_dir)]
    if num_processes == 1:
        return [sys.executable, *worker]
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nproc-per-node={num_processes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={RunDir(run_dir).rendezvous}",
        "--rdzv-conf=store_type=file",
        "--local-addr=127.0.0.1",
        *worker,
    ]


def run_workers(
    run: RunDir,
    launcher: LauncherConfig,
    on_poll: Callable[[], None],
    variables: Mapping[str, str],
    keep_open: tuple[int, ...] = (),
    on_stop: Callable[[float], None] = _nothing,
    warm: WarmStart | None = None,
) -> int:
    """Run the workers of a prepared run to their end; no process that torchrun started outlives this call.

    Args:
        run: the run folder.
        launcher: the number of processes, their threads, and the minutes without progress after which all are ended.
        on_poll: called several times a second; an exception in it ends the workers, a second one kills them.
        variables: environment variables of the workers, added to this process's environment.
        keep_open: file descriptors the workers inherit, so that they keep the folder's lock if this process dies.
        on_stop: called with the grace period in seconds when an exception of `on_poll` ends the workers.
        warm: starts the worker of a run with one process, if it can.

    Returns:
        The exit code of the worker or of torchrun; 1 if ranks had to be ended that should have ended by themselves.

    Raises:
        UnresponsiveError: a process made no progress, and all were ended.
    """
    alone = launcher.num_processes == 1
    run.rendezvous.unlink(missing_ok=True)  # of a start that was killed
    with (run.rank_log(0) if alone else run.torchrun_log).open("ab") as stream:
        words, environment = _words(run, launcher), _environment(run, launcher, variables)
        rank = warm.start(words, environment, (stream.fileno(), *keep_open)) if warm else None
        process: subprocess.Popen[bytes] | WarmRank = rank or subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=keep_open,
            start_new_session=not alone,
            env=environment,
        )
    watch = RunWatch(run, launcher, process.pid)
    say_so: Callable[[float], None] = _nothing
    try:
        while process.poll() is None and watch.look():
            on_poll()
            time.sleep(POLL_S)
    except UnresponsiveError:
        raise
    except BaseException:
        say_so = on_stop
        raise
    finally:
        if not alone:
            watch.find_below()
        try:
            if is_stopped_here := process.poll() is None:
                _stop(process, on_poll, say_so, watch.below)
        finally:
            _kill(watch.below)
            watch.record_ends()
            run.rendezvous.unlink(missing_ok=True)
    on_poll()
    return 1 if is_stopped_here else process.returncode  # a signal of `_stop` is not a cause


def _words(run: RunDir, launcher: LauncherConfig) -> list[str]:
    """The command of the worker, or of torchrun, which ends when this process ends for any reason."""
    words = [*command(run.root, launcher.num_processes), WITH_PARENT]
    if launcher.num_processes == 1:
        return words
    starter = [sys.executable, "-I", "-S", str(with_parent.__file__), str(os.getpid())]
    return [*starter, *words]


def _environment(
    run: RunDir, launcher: LauncherConfig, variables: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the workers; several share the cores, and have gloo on the loopback interface only."""
    own = dict.fromkeys((with_parent.PARENT, with_parent.COMMAND), str(os.getpid()))
    if (number := launcher.num_processes) == 1:
        return {**os.environ, **variables, **own}
    threads = launcher.num_threads or max(1, len(os.sched_getaffinity(0)) // number)
    overrides = {
        "GLOO_SOCKET_IFNAME": "lo",
        # Without this, torchrun and its ranks share a store that listens on every address.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        RENDEZVOUS: str(run.rendezvous),
    }
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **overrides, **variables, **own}


def _kill(processes: set[psutil.Process]) -> None:
    """Kill the remaining processes; a process id that has been reused since is left alone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, GRACE_S)


def _stop(
    process: subprocess.Popen[bytes] | WarmRank,
    on_poll: Callable[[], object],
    on_stop: Callable[[float], None],
    below: Iterable[psutil.Process] = (),
) -> None:
    """Terminate the process; kill it after the grace period, or at once if `on_poll` or a second Ctrl-C raises.

    SIGCONT makes it, and the processes `below` it, handle the signal even if they were stopped.
    """
    process.terminate()
    for pid in (process.pid, *(each.pid for each in below)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    until = time.monotonic() + GRACE_S
    try:
        on_stop(GRACE_S)
        while process.poll() is None and time.monotonic() < until:
            on_poll()
            time.sleep(POLL_S)
    finally:
        process.kill()
        process.wait()


class RunWatch:
    """Watches a worker, or torchrun and its ranks, of which it remembers how long each was alive."""

    def __init__(
        self,
        run: RunDir,
        launcher: LauncherConfig,
        pid: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._num, self._clock = run, launcher.num_processes, clock
        self._timeout_min = launcher.timeout_min
        self._first = psutil.Process(pid)
        #: For each rank, and for torchrun (None).
        self._watches: dict[int | None, tuple[psutil.Process, Watch]] = {}
        if self._num == 1:
            self._watches[0] = self._first, Watch(pid, self._timeout_min * 60)
        else:
            own = Watch(pid, self._timeout_min * 60, may_wait=None)
            self._watches[None] = self._first, own
        self._alive_until: dict[int, str] = {}
        self._ended_at: float | None = None
        #: Everything that torchrun has started.
        self.below: set[psutil.Process] = set()

    def look(self) -> bool:
        """Call several times a second; false once rank 0 ended so long ago that another rank must be hanging.

        Raises:
            UnresponsiveError: a process makes no progress.
        """
        if self._num > 1:
            self.find_below()
        for rank, (process, watch) in self._watches.items():
            if self._num > 1 and rank is not None and _lives(process):
                self._alive_until[rank] = now()
            if (silence := watch.look()) is not None:
                raise UnresponsiveError(self._run, rank, silence, self._timeout_min)
        return self._num == 1 or not self._is_overdue()

    def find_below(self) -> None:
        """Find what torchrun has started until now."""
        with contextlib.suppress(psutil.Error):
            self.below |= set(self._first.children(recursive=True))
            if len(self._watches) <= self._num:
                for process in self._first.children():
                    rank = _rank_of(process)
                    if rank is not None and rank not in self._watches:
                        watch = Watch(process.pid, self._timeout_min * 60, may_wait=RANK_MAY_WAIT)
                        self._watches[rank] = process, watch

    def record_ends(self) -> None:
        """Write the end of each rank that has not recorded one: the last time at which it was seen alive."""
        for rank, alive_until in self._alive_until.items():
            record_silent_end(self._run, rank, ENDED_SILENTLY, alive_until)

    def _is_overdue(self) -> bool:
        if self._ended_at is None:
            status = read_status(self._run.status)
            if status is None or status.finished is None:
                return False
            self._ended_at = self._clock()
        return self._clock() - self._ended_at > self._timeout_min * 60


def _rank_of(process: psutil.Process) -> int | None:
    """The rank of a worker; None for another process, or until the process has started its program."""
    try:
        value = process.environ().get("RANK", "")
    except psutil.Error:
        return None
    return int(value) if value.isdecimal() else None


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
