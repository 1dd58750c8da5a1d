"""Work in a child process: its exit code, its signals, and its watch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.processes.watched_child import end_child, run_in_child


def unwatched(child: int) -> Callable[[], None]:
    return lambda: None


def test_exit_code_and_signal_of_the_child_are_returned() -> None:
    assert run_in_child(lambda: 7, unwatched) == 7

    def dies() -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert run_in_child(dies, unwatched) == -signal.SIGKILL


def test_error_of_the_child_is_printed_and_exit_code_1(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise ValueError("no such thing")

    assert run_in_child(fails, unwatched) == 1
    assert "ValueError: no such thing" in capfd.readouterr().err


def test_watch_may_end_a_stopped_child() -> None:
    def stops() -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    def look(child: int) -> Callable[[], None]:
        def once() -> None:
            end_child(child, 20.0)
            raise TimeoutError(str(child))

        return once

    with pytest.raises(TimeoutError):
        run_in_child(stops, look)


def test_handler_of_the_parent_that_raises_ends_the_child_alone() -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    def look(child: int) -> Callable[[], None]:
        os.kill(child, signal.SIGTERM)  # the child may not have started yet
        return lambda: None

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        for _ in range(20):
            assert run_in_child(lambda: time.sleep(60) or 0, look) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from quantexp.processes.watched_child import end_like, run_in_child
def work():
    if sys.argv[2] == "handles":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(42))
    Path(sys.argv[1]).with_suffix(".part").write_text(str(os.getpid()))
    Path(sys.argv[1]).with_suffix(".part").rename(sys.argv[1])
    while True:
        time.sleep(0.1)  # a signal just before a sleep is handled after it
sys.exit(end_like(run_in_child(work, lambda child: lambda: None)))
"""


@pytest.mark.parametrize(
    ("how", "to_child", "number", "code"),
    [
        ("handles", False, signal.SIGTERM, 42),
        ("dies", True, signal.SIGKILL, -signal.SIGKILL),
        ("dies", True, signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_signals_reach_the_child_and_the_parent_ends_as_it_does(
    tmp_path: Path, how: str, to_child: bool, number: int, code: int
) -> None:
    file = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(file), how]) as process:
        while not file.exists():
            assert process.poll() is None
        os.kill(int(file.read_text()) if to_child else process.pid, number)
        assert process.wait(120) == code


def test_child_ends_with_its_parent(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file), "dies"], stdout=subprocess.PIPE
    ) as process:
        while not file.exists():
            assert process.poll() is None
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == b"", "the child's copy is closed: it has ended"
