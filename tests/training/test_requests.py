"""What a run is asked to do between two iterations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from quantexp.schema import CheckpointConfig
from quantexp.training.requests import SPARE_S, Request, Requests


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def requests(clock: Clock, **keys: object) -> Requests:
    return Requests(CheckpointConfig(**keys), clock)  # type: ignore[arg-type]


def after(received: Requests, clock: Clock, seconds: float, save_s: float = 0.0) -> Request:
    clock.now += seconds
    return received.after_iteration(save_s)


def test_nothing_is_asked_without_a_reason() -> None:
    clock = Clock()
    received = requests(clock, optimizer=True)
    assert after(received, clock, 1000.0) is Request.NONE


def test_checkpoint_is_due_after_minutes_from_the_last_one_whatever_caused_that() -> None:
    clock = Clock()
    received = requests(clock, every_min=2.0)
    assert after(received, clock, 119) is Request.NONE
    assert after(received, clock, 1) is Request.SAVE
    received.saved()
    assert after(received, clock, 119) is Request.NONE
    received.saved()
    assert after(received, clock, 60) is Request.NONE
    assert after(received, clock, 60) is Request.SAVE


def test_signal_asks_for_the_end_and_the_end_includes_a_save() -> None:
    clock = Clock()
    received = requests(clock, optimizer=True, every_min=1.0)
    received.ends = True
    assert after(received, clock, 60) is Request.END
    assert max(Request) is Request.END
    assert [each for each in Request if each.ends] == [Request.END_AT_LIMIT, Request.END]


@pytest.mark.parametrize(("save_s", "last_start"), [(0.0, 285.0), (20.0, 255.0)])
def test_time_limit_asks_as_late_as_the_last_save_allows(save_s: float, last_start: float) -> None:
    """Iterations of 5 s, 300 s until the limit: an iteration, 1.5 saves and the spare time must fit after it."""
    clock = Clock()
    received = requests(clock, optimizer=True)
    received.warn(300)
    start = clock.now
    while (request := after(received, clock, 5, save_s)) is Request.NONE:
        assert clock.now - start <= last_start
    assert request is Request.END_AT_LIMIT
    assert 300 - (last_start + 5) < 5 + 1.5 * save_s + SPARE_S
    assert clock.now - start == last_start + 5


def test_run_without_a_training_state_is_not_ended_before_its_limit() -> None:
    clock = Clock()
    received = requests(clock)
    received.warn(1)
    assert after(received, clock, 10) is Request.NONE
    assert not received.is_possible


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({}, False), ({"every": 3}, False), ({"optimizer": True}, True), ({"every_min": 1.0}, True)],
)
def test_ranks_agree_only_if_they_may_be_asked(keys: dict[str, object], expected: bool) -> None:
    assert requests(Clock(), **keys).may_come is expected
