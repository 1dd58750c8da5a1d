"""Processes are stopped at any moment: the watchdog or `quantexp cancel` ends their run, and says what it saw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest

from quantexp.launch.ledger import cancel as module
from quantexp.launch.ledger.cancel import cancel
from quantexp.launch.ledger.standing import standings
from quantexp.runs.status import State

from .fake_runs import MOMENTS, FakeRun, start, stop

#: A timeout that every case here reaches, and one that none does.
SHORT_S, LONG_S = 1.5, 600.0
PLACES = {
    "importing": "while importing",
    "training": "at iteration 3, micro-batch 2",
    "drawing": "at iteration 3, micro-batch 2",
}


def stopped(
    case: random.Random, folder: Path, config: str, timeout_s: float
) -> tuple[FakeRun, str]:
    """A run of which one process is stopped, and what the reason calls that process."""
    num_processes, moment = case.choice((1, 2, 3)), case.choice(MOMENTS)
    fake = start(folder, moment, num_processes, timeout_s, config)
    rank = case.randrange(num_processes)
    is_torchrun = num_processes > 1 and case.random() < 0.25
    stop(fake.torchrun() if is_torchrun else fake.rank(rank))
    if num_processes == 1:
        return fake, ""
    return fake, "torchrun: " if is_torchrun else f"rank {rank}: "


def attack(case: random.Random, folder: Path, config: str) -> None:
    fake, who = stopped(case, folder, config, SHORT_S)
    try:
        status = fake.end()
        reason = status.reason
        if fake.moment == "drawing":
            assert status.state is State.COMPLETED, reason
            reason = reason.removeprefix("training is complete; after it: ")
        else:
            assert status.state is State.FAILED, reason
        assert reason.startswith(f"{who}no progress for "), reason
        assert (
            f"(launcher.timeout_min=0.025) {PLACES[fake.moment]}; the process was stopped by a signal (state T)"
            in (reason)
        )
        assert not fake.left()
    finally:
        fake.kill_all()


def attack_by_cancel(case: random.Random, folder: Path, config: str) -> None:
    fake, _ = stopped(case, folder, config, LONG_S)
    if case.random() < 0.3:
        stop(psutil.Process(fake.command.pid))
    try:
        (outcome,) = cancel(standings([fake.run]))
        assert outcome.done, outcome
        status = fake.end()
        expected = State.COMPLETED if fake.moment == "drawing" else State.CANCELLED
        assert status.state is expected, status.reason
        assert not fake.left()
    finally:
        fake.kill_all()


def test_stopped_process_ends_its_run(
    cases: Iterator[random.Random], tmp_path: Path, config: str
) -> None:
    for index, case in enumerate(islice(cases, 2)):
        attack(case, tmp_path / f"m-{index}", config)


@pytest.mark.slow
def test_many_stopped_processes_end_their_runs(
    cases: Iterator[random.Random], tmp_path: Path, config: str
) -> None:
    for index, case in enumerate(cases):
        attack(case, tmp_path / f"m-{index}", config)


@pytest.mark.slow
def test_cancel_ends_runs_with_stopped_processes(
    cases: Iterator[random.Random],
    tmp_path: Path,
    config: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KILL_AFTER_S", 4.0)
    for index, case in enumerate(cases):
        attack_by_cancel(case, tmp_path / f"m-{index}", config)
