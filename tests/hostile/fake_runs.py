"""Runs of fake workers below a real `carry_out`, to be signalled at a chosen moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from quantexp.runs.lock import is_locked
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, now, read_status, write_status

DRIVER = Path(__file__).with_name("driver.py")
MOMENTS = ("importing", "training", "drawing")
#: Seconds that anything here may take on a busy machine.
PATIENCE_S = 240.0


@dataclass
class FakeRun:
    """A run that waits at a moment."""

    run: RunDir
    command: subprocess.Popen[bytes]
    num_processes: int
    moment: str

    def torchrun(self) -> psutil.Process:
        """The process below the command: the worker, or torchrun."""
        (child,) = psutil.Process(self.command.pid).children()
        return child

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        if self.num_processes == 1:
            return self.torchrun()
        ranks = {int(each.environ()["RANK"]): each for each in self.torchrun().children()}
        return ranks[rank]

    def left(self) -> list[psutil.Process]:
        """Every process with the run's folder on its command line."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if str(self.run.root) in (process.info["cmdline"] or [])
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ]

    def go_on(self) -> None:
        """Let the workers finish."""
        (self.run.root / "go-on").touch()

    def end(self) -> Status:
        """The status after the command, and all of its processes, have ended."""
        self.command.wait(PATIENCE_S)
        until(lambda: not self.left() and not is_locked(self.run), f"the end of {self.run.root}")
        return self.status()

    def status(self) -> Status:
        status = read_status(self.run.status)
        assert status is not None
        return status

    def kill_all(self) -> None:
        for process in self.left():
            process.kill()
        self.command.kill()
        self.command.wait()


def start(folder: Path, moment: str, num_processes: int, timeout_s: float, config: str) -> FakeRun:
    """Start a run and wait until all its workers wait at the moment."""
    run = RunDir(folder)
    run.logs.mkdir(parents=True)
    run.config.write_text(config)
    status = Status(
        State.PENDING, created=now(), iterations=8, launcher="local", host=os.uname().nodename
    )
    write_status(run.status, status)
    words = [sys.executable, str(DRIVER), str(run.root), moment, str(num_processes), str(timeout_s)]
    with (folder / "driver.log").open("wb") as log:
        command = subprocess.Popen(words, stdout=log, stderr=log)
    fake = FakeRun(run, command, num_processes, moment)
    try:
        files = [folder / f"at-{rank}" for rank in range(num_processes)]
        until(lambda: all(file.exists() for file in files), f"{moment} in {folder}")
        time.sleep(0.15)  # the command looks at the ranks once more
    except BaseException:
        fake.kill_all()
        raise
    return fake


def until(condition: object, what: str) -> None:
    """Wait for a condition; too long fails the test."""
    assert callable(condition)
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


def stop(process: psutil.Process) -> None:
    """Stop a process, and wait until it is."""
    process.send_signal(signal.SIGSTOP)
    until(lambda: process.status() == psutil.STATUS_STOPPED, f"stop of {process}")
