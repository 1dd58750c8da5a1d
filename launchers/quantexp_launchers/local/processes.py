"""Runs a prepared run folder on this machine, as processes of its own, in the foreground.

The folder is all that a process is given. Its output goes to the folder's log; how far it is, the caller reads from the
folder. One process: a Ctrl-C reaches the whole process group, so the worker ends itself as cancelled and is waited for.
Several: torchrun starts and watches them in a session of their own, finds them through a file (no port of the machine
is opened to the network), and ends all of them once one has failed. Whatever happens, no rank is left running: where
this process is killed, the kernel ends the worker, or torchrun, which ends its ranks.
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

#: Asks a worker to end when the process that started it ends, however that ends.
WITH_PARENT = "--with-parent"
#: Seconds between two looks at a running worker.
POLL_S = 0.1
#: Seconds that an interrupted worker has to write its state before it is killed.
GRACE_S = 20.0


def _nothing(grace_s: float) -> None:
    """Nobody is told that an end was asked for."""


def command(run_dir: Path, num_processes: int = 1) -> list[str]:
    """What starts a prepared run folder's worker, or its workers under torchrun."""
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
        log: where its standard output and error go.
        on_poll: called several times a second while it runs; what it raises ends the worker, and raised again gives it
            no more time.
        variables: of its environment, beside this process's.
        keep_open: file descriptors the worker inherits (the folder's lock outlives us with it).
        on_stop: called when the worker is asked to end because of what `on_poll` raised, with the seconds it has.
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
    """Run several workers to their end and return torchrun's exit code; none of them is left afterwards.

    Args:
        run_dir: a prepared run folder.
        num_processes: how many ranks.
        num_threads: CPU threads of each; None shares the machine's cores among them.
        log: where torchrun's own output goes; each rank has a log of its own.
        on_poll: called several times a second; False ends them, which they should have done by themselves. What it
            raises ends them too, and raised again gives them no more time.
        variables: of their environment, beside this process's.
        keep_open: file descriptors torchrun inherits (the folder's lock outlives us with it).
        on_stop: called when they are asked to end because of what `on_poll` raised, with the seconds they have.
    """
    say_so: Callable[[float], None] = _nothing
    ranks: set[psutil.Process] = set()
    with log.open("ab") as stream:
        process = subprocess.Popen(
            _ending_with_us([*command(run_dir, num_processes), WITH_PARENT]),
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
    """This process's, with each rank's share of the cores, and gloo on the loopback interface alone."""
    threads = num_threads or max(1, len(os.sched_getaffinity(0)) // num_processes)
    ours = {
        "GLOO_SOCKET_IFNAME": "lo",
        # Else torchrun and its ranks share a store that listens at every address.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **ours}


def _below(pid: int) -> set[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def _kill(processes: set[psutil.Process]) -> None:
    """Kill what is left; a process id that was given to another process in between is left alone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, GRACE_S)


def _ending_with_us(words: list[str]) -> list[str]:
    """The command for a process that ends with this one, however this one ends."""
    starter = [sys.executable, "-I", "-S", str(with_parent.__file__), str(os.getpid())]
    return [*starter, *words]


def _stop(
    process: "subprocess.Popen[bytes]",
    on_poll: Callable[[], object],
    on_stop: Callable[[float], None],
) -> None:
    """Ask for an end; insist after a while, or at once where `on_poll` or a second Ctrl-C raises."""
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
