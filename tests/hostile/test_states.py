"""Any process of a run gets any signal at any moment: the state says what happened, and no process is left."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from quantexp.runs.ranks import ENDED_SILENTLY
from quantexp.runs.status import State

from .fake_runs import MOMENTS, FakeRun, start

SIGNALS = (signal.SIGKILL, signal.SIGTERM)
#: A timeout that no case here reaches.
LONG_S = 600.0


def expected(fake: FakeRun, who: str, rank: int, number: signal.Signals) -> tuple[State, str]:
    """The state, and the start of the reason, if a process gets a signal before training is complete."""
    is_kill = number is signal.SIGKILL
    if who == "command":
        why = f"its quantexp command, process {fake.command.pid}, ended without ending it (killed?)"
        return (State.PREEMPTED, why) if is_kill else (State.CANCELLED, "interrupted")
    if who == "torchrun":
        why = f"torchrun was ended by SIGKILL (out of memory?); see {fake.run.torchrun_log}"
        return (State.FAILED, why) if is_kill else (State.CANCELLED, "interrupted")
    if fake.num_processes == 1:
        why = f"the worker was ended by SIGKILL (out of memory?); see {fake.run.rank_log(0)}"
        return (State.FAILED, why) if is_kill else (State.CANCELLED, "interrupted")
    if is_kill:
        return State.FAILED, f"rank {rank} {ENDED_SILENTLY}; "
    return State.CANCELLED, f"rank {rank} was ended by SIGTERM"


def attack(case: random.Random, folder: Path, config: str) -> None:
    num_processes, moment = case.choice((1, 2, 3)), case.choice(MOMENTS)
    who = case.choice(("rank", "command", *["torchrun"] * (num_processes > 1)))
    rank, number = case.randrange(num_processes), case.choice(SIGNALS)
    fake = start(folder, moment, num_processes, LONG_S, config)
    try:
        target = {"command": fake.command.pid, "torchrun": fake.torchrun().pid}
        pid = target.get(who) or fake.rank(rank).pid
        state, reason = expected(fake, who, rank, number)
        os.kill(pid, number)
        status = fake.end()
        assert not fake.left()
        about = (num_processes, moment, who, rank, number.name, status.reason)
        if moment == "drawing":
            assert status.state is State.COMPLETED, about
            reason = f"training is complete; after it: {reason}"
        else:
            assert status.state is state, about
        assert status.reason.startswith(reason), about
        assert status.finished is not None
    finally:
        fake.kill_all()


def test_state_is_true_after_any_signal(
    cases: Iterator[random.Random], tmp_path: Path, config: str
) -> None:
    for index, case in enumerate(islice(cases, 3)):
        attack(case, tmp_path / f"run-{index}", config)


@pytest.mark.slow
def test_state_is_true_after_30_signals(
    cases: Iterator[random.Random], tmp_path: Path, config: str
) -> None:
    for index, case in enumerate(cases):
        attack(case, tmp_path / f"run-{index}", config)
