"""Runs the workers of a prepared run folder on this machine, as child processes.

The folder is a worker's only input. The worker's output goes to the folder's log; the caller reads its progress from
the folder. With one process, Ctrl-C reaches the whole process group: the worker ends itself as cancelled, and this
module waits for it. With several processes, torchrun starts and monitors them in their own session, with a rendezvous
file instead of a port, and ends all of them when one fails. No rank outlives its run: if this process is killed, the
kernel ends the worker, or torchrun, which ends its ranks.
"""

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
from quantexp.runs.outcome import UnresponsiveError
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import RENDEZVOUS
from quantexp.schema import LauncherConfig
from quantexp_launchers.local.watch import RunWatch

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
) -> int:
    """Run the workers of a prepared run to their end; no process that torchrun started outlives this call.

    Args:
        run: the run folder.
        launcher: the number of processes, their threads, and the minutes without progress after which all are ended.
        on_poll: called several times a second; an exception in it ends the workers, a second one kills them.
        variables: environment variables of the workers, added to this process's environment.
        keep_open: file descriptors the workers inherit, so that they keep the folder's lock if this process dies.
        on_stop: called with the grace period in seconds when an exception of `on_poll` ends the workers.

    Returns:
        The exit code of the worker or of torchrun; 1 if ranks had to be ended that should have ended by themselves.

    Raises:
        UnresponsiveError: a process made no progress, and all were ended.
    """
    alone = launcher.num_processes == 1
    run.rendezvous.unlink(missing_ok=True)  # of a start that was killed
    with (run.rank_log(0) if alone else run.torchrun_log).open("ab") as stream:
        process = subprocess.Popen(
            _words(run, launcher),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=keep_open,
            start_new_session=not alone,
            env=_environment(run, launcher, variables),
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
    process: "subprocess.Popen[bytes]",
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
