"""Which iterations are captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quantexp.capture.select.schedule import captured_iterations, check_schedule, ends_by_itself
from quantexp.errors import ConfigError
from quantexp.launch.reuse import covers
from quantexp.schema import CaptureConfig, CaptureLevel, Experiment

TENSORS = CaptureConfig(level=CaptureLevel.tensors)


def iterations_of(keys: dict[str, Any]) -> list[int]:
    return list(captured_iterations(replace(TENSORS, **keys), 20))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [1]),
        ({"first_iteration": 3}, [3]),
        ({"control_iter": 3}, [1, 2, 3]),
        ({"first_iteration": 19, "control_iter": 5}, [19, 20]),
        ({"first_iteration": 18, "control_iter": 0}, [18, 19, 20]),
        ({"first_iteration": 21}, []),
        ({"iterations": ["7", "2", "2"]}, [2, 7]),
        ({"iterations": ["18-30", "1"]}, [1, 18, 19, 20]),
        ({"iterations": ["1-9"], "first_iteration": 8}, [8, 9]),
        ({"iterations": ["1-9"], "control_iter": 2}, [1, 2]),
        ({"iterations": ["1-3"], "control_iter": 0}, [1, 2, 3]),
        ({"every": 7}, [7, 14]),
        ({"every": 5, "first_iteration": 6}, [10, 15, 20]),
        ({"every": 5, "first_iteration": 10, "control_iter": 2}, [10, 15]),
        ({"every": 1}, list(range(1, 21))),
        ({"powers_of_two": True}, [1, 2, 4, 8, 16]),
        ({"powers_of_two": True, "every": 8, "iterations": ["3"]}, [1, 2, 3, 4, 8, 16]),
        ({"level": CaptureLevel.off, "every": 1}, []),
        ({"at_end": True}, [1, 20]),
        ({"at_end": True, "control_iter": 2}, [1, 2, 20]),
        ({"at_end": True, "every": 10}, [10, 20]),
        ({"at_end": True, "iterations": ["7"]}, [7, 20]),
        ({"at_end": True, "first_iteration": 21}, []),
        ({"at_end": True, "stop_after_capture": True}, [1]),
        ({"at_end": True, "level": CaptureLevel.off}, []),
    ],
)
def test_the_schedule_is_the_union_of_its_keys(keys: dict[str, Any], expected: list[int]) -> None:
    assert iterations_of(keys) == expected


def test_every_iteration_of_a_long_run_takes_no_memory() -> None:
    assert isinstance(captured_iterations(replace(TENSORS, every=1), 10**9), range)
    assert isinstance(captured_iterations(replace(TENSORS, control_iter=0), 10**9), range)


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({}, True),
        ({"control_iter": 0}, False),
        ({"every": 5}, False),
        ({"every": 5, "control_iter": 3}, True),
        ({"iterations": ["5"]}, True),
        ({"iterations": ["5"], "powers_of_two": True}, False),
        ({"level": CaptureLevel.off}, False),
    ],
)
def test_a_schedule_that_ends_by_itself_is_recognised(keys: dict[str, Any], ends: bool) -> None:
    assert ends_by_itself(replace(TENSORS, **keys)) is ends


@pytest.mark.parametrize("item", ["0", "x", "5-4", "1:3", "-2", ""])
def test_an_invalid_iteration_is_refused(tiny: Callable[..., Experiment], item: str) -> None:
    with pytest.raises(ConfigError, match=r"capture.iterations must list iterations from 1 and ra"):
        tiny(f"capture.iterations=['{item}']")


def test_a_schedule_without_an_iteration_of_the_run_is_refused(
    tiny: Callable[..., Experiment],
) -> None:
    with pytest.raises(
        ConfigError, match=r"capture.every must name an iteration from .*names none"
    ):
        tiny("capture.every=50")
    with pytest.raises(ConfigError, match=r"capture.every must be at least 1, got 0"):
        tiny("capture.every=0")
    assert tiny("capture.every=50", "capture=off").capture.every == 50


def test_the_command_line_takes_numbers_and_ranges(tiny: Callable[..., Experiment]) -> None:
    assert tiny("capture.iterations=[1,2-9]").capture.iterations == ["1", "2-9"]


@pytest.mark.parametrize(
    ("earlier", "requested", "covered"),
    [
        ({"every": 5}, {"iterations": ["5", "10"]}, True),
        ({"every": 5}, {"iterations": ["5", "11"]}, False),
        ({"every": 2}, {"powers_of_two": True, "first_iteration": 2}, True),
        ({"control_iter": 0}, {"every": 3}, True),
    ],
)
def test_an_earlier_schedule_covers_its_own_iterations(
    earlier: dict[str, Any], requested: dict[str, Any], covered: bool
) -> None:
    pair = replace(TENSORS, **earlier), replace(TENSORS, **requested)
    assert covers(*pair, iterations=20) is covered


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"iterations": ["1-2000000"]},
            "capture.iterations must name at most 1,000,000 iterations",
        ),
        ({"iterations": ["1-600000"] * 2}, "got 1,200,000; for more, use capture.every alone"),
        ({"every": 1, "powers_of_two": True}, "capture.every, capture.powers_of_two must name at"),
    ],
)
def test_more_iterations_than_can_be_listed_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_schedule(replace(TENSORS, **keys), 2_000_000)
    check_schedule(replace(TENSORS, every=1), 2_000_000)
