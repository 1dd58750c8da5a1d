"""Machines that share a folder and see none of each other's locks: a run executes once, whoever is killed or stopped.

Each process is a machine of its own: with another boot, and with locks that always succeed.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from quantexp.errors import RunInUseError
from quantexp.runs import fencing
from quantexp.runs.fencing import START, is_ours
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir

#: Steps of a run, each with one line in the file `written`.
STEPS = 10
PATIENCE_S = 200.0


def machine(run: RunDir, name: str, seconds: float) -> None:
    """What `open_run` and a worker do: try to execute the run until it is completed."""
    own = fencing.own_claim
    setattr(fcntl, "flock", lambda *_: None)  # noqa: B010
    setattr(fencing, "own_claim", lambda: replace(own(), boot=name, machine="", host=name))  # noqa: B010
    while not (run.root / "done").exists():
        lock = take_lock(run)
        try:
            with fencing.claimed(run) as start:
                os.environ[START] = start
                if not (run.root / "done").exists():  # looked at again under the claim
                    execute(run, start, seconds)
        except RunInUseError:
            time.sleep(0.01)
        os.close(lock)


def execute(run: RunDir, start: str, seconds: float) -> None:
    for _ in range(STEPS):
        time.sleep(seconds / STEPS)
        if not is_ours(run):
            os._exit(1)
        with (run.root / "written").open("a") as stream:
            stream.write(f"{start}\n")
    (run.root / "done").touch()


class Machines:
    """Several machines that want to execute one run."""

    def __init__(self, folder: Path, number: int, seconds: float) -> None:
        folder.mkdir()
        self.run, self.written = RunDir(folder), folder / "written"
        self.of = {
            f"m{i}": get_context("fork").Process(target=machine, args=(self.run, f"m{i}", seconds))
            for i in range(number)
        }
        for process in self.of.values():
            process.start()

    def executing(self) -> ForkProcess | None:
        """The machine that has begun to write; None if it has ended by now."""
        until(lambda: self.written.exists() and self.starts())
        holder = fencing.read_claim(self.run)
        return None if holder is None else self.of[holder.host]

    def starts(self) -> list[str]:
        """The starts that wrote, one word for each step."""
        return self.written.read_text().split()

    def end(self) -> list[int | None]:
        """The exit codes, once every machine has ended."""
        for process in self.of.values():
            process.join(PATIENCE_S)
        return [process.exitcode for process in self.of.values()]

    def kill(self) -> None:
        for process in self.of.values():
            process.kill()
            process.join()


def until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def attack(case: random.Random, folder: Path) -> None:
    machines = Machines(folder, case.randrange(2, 5), case.uniform(0.2, 0.6))
    number = case.choice((None, signal.SIGKILL, signal.SIGSTOP))
    try:
        first = None if number is None else machines.executing()
        if first is not None and number is not None:
            assert first.pid is not None
            os.kill(first.pid, number)
            time.sleep(0.3)
            assert len(set(machines.starts())) == 1, "another began beside the claim"
            machines.run.claim.unlink(missing_ok=True)  # the user believes that the machine is off
            until((folder / "done").exists)
            if first.is_alive():
                os.kill(first.pid, signal.SIGCONT)
        assert set(machines.end()) <= ({0} if first is None else {0, 1, -signal.SIGKILL})
        starts = machines.starts()
        order = list(dict.fromkeys(starts))
        assert len(order) <= (1 if first is None else 2)
        assert starts.count(order[-1]) == STEPS
        late = starts[starts.index(order[-1]) :].count(order[0]) if len(order) > 1 else 0
        assert late <= 1, "only the step in which it was stopped"
        assert number is signal.SIGKILL or not machines.run.claim.exists()
    finally:
        machines.kill()


def test_each_run_executes_once_on_machines_that_see_no_lock(
    cases: Iterator[random.Random], tmp_path: Path
) -> None:
    for index, case in enumerate(islice(cases, 3)):
        attack(case, tmp_path / f"run-{index}")


@pytest.mark.slow
def test_many_runs_execute_once(cases: Iterator[random.Random], tmp_path: Path) -> None:
    for index, case in enumerate(cases):
        attack(case, tmp_path / f"run-{index}")
