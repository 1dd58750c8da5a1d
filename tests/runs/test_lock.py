"""The lock of a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quantexp.errors import RunError, RunInUseError
from quantexp.runs.lock import hold, is_held, is_locked, take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Status, write_status

HOLDS = "import sys; from pathlib import Path; from quantexp.runs.lock import take_lock\n"
HOLDS += "from quantexp.runs.paths import RunDir\n"
HOLDS += "take_lock(RunDir(Path(sys.argv[1]))); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_lock_in_use_is_refused_with_its_holder(run: RunDir) -> None:
    lock = take_lock(run)
    write_status(run.status, Status(pid=7, host="there"))
    with pytest.raises(RunInUseError, match=r"is in use by process 7 on there; wait for it, or"):
        take_lock(run, patience_s=0)
    os.close(lock)
    os.close(take_lock(run))


def test_holder_that_is_killed_leaves_nothing_stale(run: RunDir) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(run.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_locked(run)
        holder.send_signal(signal.SIGKILL)
    assert not is_locked(run)
    os.close(take_lock(run))


def test_looking_at_the_lock_does_not_interfere_with_taking_it(run: RunDir) -> None:
    os.close(take_lock(run))
    looking = threading.Event()

    def look() -> None:
        while not looking.is_set():
            is_locked(run)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(100):
            os.close(take_lock(run))
    finally:
        looking.set()
        watcher.join()


def test_taking_a_lock_waits_for_the_patience(run: RunDir) -> None:
    lock, released = take_lock(run), threading.Event()

    def release() -> None:
        released.set()
        os.close(lock)

    threading.Timer(0.3, release).start()
    os.close(take_lock(run, patience_s=120))
    assert released.is_set()


def test_folder_without_a_lock_is_not_locked(run: RunDir) -> None:
    assert not is_locked(run)


def test_disk_without_locks_is_named(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(RunError, match=r"cannot be locked: No locks available; set paths\.root to"):
        take_lock(run)


def test_lock_of_any_file_is_visible_until_its_release(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not is_held(file)
    lock = hold(file)
    assert is_held(file)
    os.close(lock)
    assert not is_held(file)


def test_lock_of_a_file_on_a_disk_without_locks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(OSError, match="No locks available"):
        hold(tmp_path / "lock")


def test_file_on_a_disk_without_locks_counts_as_unlocked(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.close(take_lock(run))

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert not is_locked(run)
