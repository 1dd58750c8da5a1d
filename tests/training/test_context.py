"""The status that a rank records of its run, and how often it is written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import Rank
from quantexp.runs.status import Phase, Status, read_status
from quantexp.schema import Experiment
from quantexp.training import context as module
from quantexp.training.context import RunContext

Make = Callable[..., RunContext]


@pytest.fixture
def context(tiny: Callable[..., Experiment], tmp_path: Path) -> Make:
    """Contexts of a run, one for each rank."""

    def make(rank: Rank | None = None) -> RunContext:
        return RunContext(RunDir(tmp_path), tiny(), rank)

    return make


def read_back(context: RunContext) -> Status:
    status = read_status(context.run.status)
    assert status is not None
    return status


def test_a_phase_is_written_at_once_and_logged_when_it_begins(
    context: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quantexp")
    one = context()
    one.set_phase(Phase.BUILDING)
    assert read_back(one).phase is Phase.BUILDING
    one.set_phase(Phase.BUILDING)
    one.set_phase(Phase.TRAINING)
    assert read_back(one).phase is Phase.TRAINING
    assert caplog.messages == [Phase.BUILDING.value]


def test_a_micro_batch_of_the_same_phase_waits_for_the_interval(
    context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = context()
    monkeypatch.setattr(module, "STATUS_INTERVAL_S", 3600.0)
    one.set_micro_batch(Phase.TRAINING, 1, 1)
    assert (read_back(one).current_iteration, read_back(one).micro_batch) == (1, 1)
    one.set_micro_batch(Phase.TRAINING, 1, 2)
    assert read_back(one).micro_batch == 1, "not written yet"
    assert one.status.micro_batch == 2
    one.set_micro_batch(Phase.CAPTURING, 2, 1)
    assert read_back(one).current_iteration == 2, "a new phase does not wait"
    monkeypatch.setattr(module, "STATUS_INTERVAL_S", -1.0)
    one.set_micro_batch(Phase.CAPTURING, 2, 2)
    assert read_back(one).micro_batch == 2


def test_rank_that_does_not_lead_writes_no_status_and_has_no_trackers(context: Make) -> None:
    second = context(Rank(1, 2, 1))
    second.set_phase(Phase.BUILDING)
    second.set_micro_batch(Phase.TRAINING, 1, 1)
    assert not second.run.status.exists()
    assert second.tracking is None
    assert context(Rank(0, 2, 0)).tracking is not None
