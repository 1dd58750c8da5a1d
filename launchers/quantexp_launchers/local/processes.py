"""Runs the workers of a prepared run folder on this machine, as child processes.

The folder is a worker's only input. The worker's output goes to the folder's log; the caller reads its progress from
the folder. With one process, Ctrl-C reaches the whole process group: the worker ends itself as cancelled, and this
module waits for it. With several processes, torchrun starts and monitors them in their own session, with a rendezvous
file instead of a port, and ends all of them when one fails. No rank outlives its run: if this process is killed, the
kernel ends the worker, or torchrun, which ends its ranks.
"""

import contextlib
import math
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
from quantexp.runs.ranks import RENDEZVOUS
from quantexp_launchers.local.watch import RankWatch, require_progress

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


def run_worker(
    run_dir: Path,
    log: Path,
    on_poll: Callable[[], None],
    variables: Mapping[str, str],
    keep_open: tuple[int, ...] = (),
    on_stop: Callable[[float], None] = _nothing,
    timeout_min: float = math.inf,
) -> int:
    """Run one worker to its end and return its exit code.

    Args:
        run_dir: a prepared run folder.
        log: the file for its standard output and error.
        on_poll: called several times a second; an exception in it ends the worker, a second one kills it.
        variables: environment variables of the worker, added to this process's environment.
        keep_open: file descriptors the worker inherits, so that it keeps the folder's lock if this process dies.
        on_stop: called with the grace period in seconds when an exception of `on_poll` ends the worker.
        timeout_min: minutes without progress after which the worker is ended.

    Raises:
        UnresponsiveError: the worker made no progress, and was ended.
    """
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [*command(run_dir), WITH_PARENT],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=keep_open,
            env={**os.environ, **variables, **_own_ids()},
        )
        run, watch = RunDir(run_dir), Watch(process.pid, timeout_min * 60)
        try:
            while process.poll() is None:
                on_poll()
                require_progress(run, 0, watch, timeout_min)
                time.sleep(POLL_S)
        except UnresponsiveError:
            _stop(process, on_poll, _nothing)
            raise
        except BaseException:
            _stop(process, on_poll, on_stop)
            raise
        on_poll()
    return process.returncode


def run_ranks(
    run_dir: Path,
    num_processes: int,
    num_threads: int | None,
    log: Path,
    on_poll: Callable[[], bool],
    variables: Mapping[str, str],
    keep_open: tuple[int, ...] = (),
    on_stop: Callable[[float], None] = _nothing,
    timeout_min: float = math.inf,
) -> int:
    """Run several workers to their end and return torchrun's exit code; no worker outlives this call.

    Args:
        run_dir: a prepared run folder.
        num_processes: the number of ranks.
        num_threads: CPU threads of each rank; None divides the machine's cores among them.
        log: the file for torchrun's output; each rank has its own log.
        on_poll: called several times a second; False ends the workers, which should have ended by themselves. An
            exception in it ends them too, a second one kills them.
        variables: environment variables of the workers, added to this process's environment.
        keep_open: file descriptors torchrun inherits, so that it keeps the folder's lock if this process dies.
        on_stop: called with the grace period in seconds when an exception of `on_poll` ends the workers.
        timeout_min: minutes without progress of one of the processes after which all are ended.

    Raises:
        UnresponsiveError: a process made no progress, and all were ended.
    """
    say_so: Callable[[float], None] = _nothing
    ranks: set[psutil.Process] = set()
    rendezvous = RunDir(run_dir).rendezvous
    rendezvous.unlink(missing_ok=True)  # of a start that was killed
    with log.open("ab") as stream:
        process = subprocess.Popen(
            _ending_with_parent([*command(run_dir, num_processes), WITH_PARENT]),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=keep_open,
            start_new_session=True,
            env={
                **_environment(num_processes, num_threads),
                **variables,
                **_own_ids(),
                RENDEZVOUS: str(rendezvous),
            },
        )
        watch = RankWatch(RunDir(run_dir), process.pid, num_processes, timeout_min)
        try:
            while process.poll() is None and on_poll():
                ranks |= _below(process.pid)
                watch.look()
                time.sleep(POLL_S)
        except UnresponsiveError:
            raise
        except BaseException:
            say_so = on_stop
            raise
        finally:
            ranks |= _below(process.pid)
            try:
                if is_stopped_here := process.poll() is None:
                    _stop(process, on_poll, say_so, ranks)
            finally:
                _kill(ranks)
                watch.record_ends()
                rendezvous.unlink(missing_ok=True)
    on_poll()
    return 1 if is_stopped_here else process.returncode  # a signal of `_stop` is not a cause


def _own_ids() -> dict[str, str]:
    """The variables by which a worker, or torchrun, knows this process."""
    return dict.fromkeys((with_parent.PARENT, with_parent.COMMAND), str(os.getpid()))


def _environment(num_processes: int, num_threads: int | None) -> dict[str, str]:
    """This process's environment, with each rank's share of the cores, and gloo on the loopback interface only."""
    threads = num_threads or max(1, len(os.sched_getaffinity(0)) // num_processes)
    overrides = {
        "GLOO_SOCKET_IFNAME": "lo",
        # Without this, torchrun and its ranks share a store that listens on every address.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **overrides}


def _below(pid: int) -> set[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def _kill(processes: set[psutil.Process]) -> None:
    """Kill the remaining processes; a process id that has been reused since is left alone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, GRACE_S)


def _ending_with_parent(words: list[str]) -> list[str]:
    """The command for a process that ends when this one ends for any reason."""
    starter = [sys.executable, "-I", "-S", str(with_parent.__file__), str(os.getpid())]
    return [*starter, *words]


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
