"""Runs the workers of a prepared run folder on this machine, as child processes.

The folder is a worker's only input. The worker's output goes to the folder's log; the caller reads its progress from
the folder. With one process, Ctrl-C reaches the whole process group: the worker ends itself as cancelled, and this
module waits for it. With several processes, torchrun starts and monitors them in their own session, with a rendezvous
file instead of a port, and ends all of them when one fails. No rank outlives its run: if this process is killed, the
kernel ends the worker, or torchrun, which ends its ranks.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from quantexp.processes import with_parent
from quantexp.runs.paths import RunDir

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
) -> int:
    """Run one worker to its end and return its exit code.

    Args:
        run_dir: a prepared run folder.
        log: the file for its standard output and error.
        on_poll: called several times a second; an exception in it ends the worker, a second one kills it.
        variables: environment variables of the worker, added to this process's environment.
        keep_open: file descriptors the worker inherits, so that it keeps the folder's lock if this process dies.
        on_stop: called with the grace period in seconds when an exception of `on_poll` ends the worker.
    """
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [*command(run_dir), WITH_PARENT],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=keep_open,
            env={**os.environ, **variables, with_parent.PARENT: str(os.getpid())},
        )
        try:
            while process.poll() is None:
                on_poll()
                time.sleep(POLL_S)
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
    """
    say_so: Callable[[float], None] = _nothing
    ranks: set[psutil.Process] = set()
    with log.open("ab") as stream:
        process = subprocess.Popen(
            _ending_with_parent([*command(run_dir, num_processes), WITH_PARENT]),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=keep_open,
            start_new_session=True,
            env={**_environment(num_processes, num_threads), **variables},
        )
        try:
            while process.poll() is None and on_poll():
                ranks |= _below(process.pid)
                time.sleep(POLL_S)
        except BaseException:
            say_so = on_stop
            raise
        finally:
            ranks |= _below(process.pid)
            try:
                if process.poll() is None:
                    _stop(process, on_poll, say_so)
            finally:
                _kill(ranks)
                RunDir(run_dir).rendezvous.unlink(missing_ok=True)
    on_poll()
    return process.returncode


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
) -> None:
    """Terminate the process; kill it after the grace period, or at once if `on_poll` or a second Ctrl-C raises."""
    process.terminate()
    until = time.monotonic() + GRACE_S
    try:
        on_stop(GRACE_S)
        while process.poll() is None and time.monotonic() < until:
            on_poll()
            time.sleep(POLL_S)
    finally:
        process.kill()
        process.wait()
