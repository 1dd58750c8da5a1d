"""The processes of local runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from quantexp_launchers.local.owner import WORKER, is_worker, workers

from quantexp.runs.paths import RunDir

#: Takes the lock of argv[1] as `quantexp` does, starts a child that shares it and starts its own child, and waits.
HOLDS = """
import subprocess, sys
from pathlib import Path
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
inner = "import sys; sys.stdin.read()"
outer = (
    "import subprocess, sys; fd = int(sys.argv[1]); "
    f"words = [sys.executable, '-c', {inner!r}, 'quantexp.training.worker']; "
    "p = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=(fd,)); "
    "print(p.pid, flush=True); sys.stdin.read(); p.stdin.close(); p.wait()"
)
lock = take_lock(RunDir(Path(sys.argv[1])))
words = [sys.executable, "-c", outer, str(lock), "-m", "quantexp.training.worker"]
child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(lock,))
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read(); child.stdin.close(); child.wait()
"""


@contextmanager
def lock_holder(folder: Path) -> Iterator[tuple[int, int]]:
    """A process that holds a folder's lock, and its child that shares it."""
    command = [sys.executable, "-c", HOLDS, str(folder), "quantexp"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())


def test_first_worker_that_shares_the_lock_is_its_owner(tmp_path: Path) -> None:
    with lock_holder(tmp_path) as (_, child):
        owners = workers([RunDir(tmp_path).lock, RunDir(tmp_path / "other").lock])
        assert {lock.parent: worker.pid for lock, worker in owners.items()} == {tmp_path: child}


def test_worker_that_outlived_its_parent_is_listed(tmp_path: Path) -> None:
    with lock_holder(tmp_path) as (pid, child):
        psutil.Process(pid).kill()
        (worker,) = workers([RunDir(tmp_path).lock]).values()
        assert worker.pid == child


def test_process_that_only_looks_at_the_lock_is_no_worker(tmp_path: Path) -> None:
    lock = RunDir(tmp_path).lock
    lock.touch()
    script = "import sys; f = open(sys.argv[1]); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(lock), WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert workers([lock]) == {}
    assert workers([]) == {}


def test_worker_is_recognised_by_its_command_line() -> None:
    assert not is_worker(os.getpid())
    assert not is_worker(2**22 + 1)
