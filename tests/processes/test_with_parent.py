"""A process started to end with its parent does so, in every order of events."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from quantexp.processes import with_parent
from quantexp.processes.with_parent import PARENT, parent_from

SCRIPT = str(with_parent.__file__)
STARTS = """\
import os, subprocess, sys, time
ending = [sys.executable, "-I", "-S", sys.argv[1], sys.argv[2] or str(os.getpid())]
child = subprocess.Popen([*ending, sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process whose child ends with it; the child has already become its program."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS, SCRIPT, ""], stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def has_ended(process: psutil.Process, within_s: float = 120) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_child_of_a_killed_parent_ends_with_it(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    while "with_parent" in " ".join(child.cmdline()):  # the child has not yet become the program
        time.sleep(0.01)
    parent.kill()
    assert has_ended(child)


@pytest.mark.parametrize("reaped", [True, False])
def test_parent_that_ended_before_is_noticed(reaped: bool) -> None:
    """Also before its own parent has collected its exit status, so that its process id is still in use."""
    dead = subprocess.Popen(["true"])
    if reaped:
        dead.wait()
    else:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.run([sys.executable, "-I", "-S", SCRIPT, str(dead.pid), *command])
    assert process.returncode == -signal.SIGTERM
    dead.wait()


def test_command_has_its_own_process_id_for_its_children() -> None:
    command = [sys.executable, "-c", f"import os; print(os.getpid(), os.environ[{PARENT!r}])"]
    words = [sys.executable, "-I", "-S", SCRIPT, str(os.getpid()), *command]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    own, parent_id = process.stdout.split()
    assert own == parent_id


def test_parent_is_read_from_the_environment() -> None:
    assert parent_from({PARENT: "12"}) == 12
    assert parent_from({}) is None


def test_command_that_ends_a_moment_later_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = iter([True, True, False])
    monkeypatch.setattr(with_parent, "_lives", lambda pid: next(lives))
    assert with_parent.ended_command({with_parent.COMMAND: "7"}) == 7
    monkeypatch.setattr(with_parent, "_lives", lambda pid: True)
    assert with_parent.ended_command({with_parent.COMMAND: "7"}) is None
    assert with_parent.ended_command({}) is None


PROGRAM = """\
import hashlib, os, signal, sys, threading, time
from quantexp.processes import with_parent
with_parent.PATIENCE_S = {patience_s}
taken = []
signal.signal(signal.SIGTERM, lambda *_: taken.append(True))
signal.signal(signal.SIGUSR2, lambda *_: None)

def leave():
    print("left", flush=True)
    os._exit(7)

with_parent.leave_if_stuck([signal.SIGTERM], lambda: bool(taken), leave)
os.kill(os.getpid(), signal.SIGUSR2)  # asks for nothing
time.sleep(0.5)
print("asked", flush=True)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
{meanwhile}
print("goes on", flush=True)
"""
#: One operation of minutes that releases Python's lock, as torch's do.
LONG = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"


@pytest.mark.parametrize(
    ("meanwhile", "patience_s", "words", "code"),
    [
        (LONG, 0.2, "asked\nleft\n", 7),
        # Twice the patience after the handler, which a busy machine may delay.
        ("while not taken: time.sleep(0.1)\ntime.sleep(2)", 1.0, "asked\ngoes on\n", 0),
    ],
)
def test_process_leaves_only_if_its_main_thread_handles_no_signal(
    meanwhile: str, patience_s: float, words: str, code: int
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(meanwhile=meanwhile, patience_s=patience_s)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (process.stdout, process.returncode) == (words, code), process.stderr
