"""When a run saves its model, and that it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantexp.errors import ConfigError, RunError
from quantexp.launch.attempt import open_run
from quantexp.model.checkpoints import (
    checkpoint_bytes,
    folder_of,
    iterations_saved,
    require_room,
    saved_iterations,
)
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import CheckpointConfig, Experiment

Tiny = Callable[..., Experiment]
RunTiny = Callable[..., RunDir]


@pytest.mark.parametrize(
    ("every", "at_end", "saved"),
    [
        (None, False, []),
        (None, True, [10]),
        (4, False, [4, 8]),
        (4, True, [4, 8, 10]),
        (5, True, [5, 10]),
        (10, False, [10]),
    ],
)
def test_iterations_that_are_saved(every: int | None, at_end: bool, saved: list[int]) -> None:
    assert iterations_saved(CheckpointConfig(every, at_end), 10) == saved


def test_interval_that_saves_nothing_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.every must be at least 1, got 0"):
        tiny("checkpoint.every=0")
    with pytest.raises(
        ConfigError, match=r"checkpoint\.every must be at most training\.iterations=2, got 3; ch"
    ):
        tiny("checkpoint.every=3")


@pytest.mark.slow
def test_checkpoints_have_the_predicted_size(run_tiny: RunTiny, tiny: Tiny) -> None:
    """The header is the only addition: less than 200 bytes per tensor."""
    run = run_tiny("checkpoint.every=1", "capture=off")
    assert saved_iterations(run) == [1, 2]
    predicted = checkpoint_bytes(tiny())
    for iteration in (1, 2):
        size = (folder_of(run, iteration) / "model.safetensors").stat().st_size
        assert 0 < size - predicted < 200 * 21


def test_folder_that_is_not_whole_is_no_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert saved_iterations(run) == []
    for name in ("iteration_00000003", "iteration_00000004.part", "notes"):
        (run.checkpoints / name).mkdir(parents=True)
    assert saved_iterations(run) == [3]


@pytest.mark.slow
def test_run_that_ends_with_its_capture_saves_its_last_iteration(
    run_tiny: RunTiny, tiny: Tiny
) -> None:
    words = ["checkpoint.at_end=true", "capture=stats", "capture.stop_after_capture=true"]
    run = run_tiny(*words)
    assert saved_iterations(run) == [1]
    with open_run(tiny(*words), "cpu", ["test"]) as (again, _):
        assert again.skipped is not None


@pytest.mark.slow
def test_completed_run_without_a_required_checkpoint_runs_again(
    run_tiny: RunTiny, tiny: Tiny
) -> None:
    run_tiny("capture=off")
    with open_run(tiny("capture=off"), "cpu", ["test"]) as (again, _):
        assert again.skipped is not None
    run = run_tiny("capture=off", "checkpoint.at_end=true")
    assert run.attempt == 2
    for words in ([], ["checkpoint.at_end=true"]):
        with open_run(tiny("capture=off", *words), "cpu", ["test"]) as (again, _):
            assert again.skipped is not None


def test_more_checkpoints_than_the_disk_holds_are_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("quantexp.model.checkpoints.shutil.disk_usage", lambda folder: Usage)
    with pytest.raises(
        RunError,
        match=r"2 checkpoints would take 0\.00\d+ GB, and .* has 1e-06 GB free; raise checkpoint\.every",
    ):
        require_room(tiny("checkpoint.every=1"), tmp_path)
    require_room(tiny(), tmp_path)


@pytest.mark.slow
def test_disk_that_fills_up_fails_the_run_with_the_reason(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Iterator[Any]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantexp.model.publish._write", fails)
    run = run_tiny("checkpoint.at_end=true", "capture=off", expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert "iteration_00000002 cannot be written (No space left on device: " in status.reason
    assert "are free); free some space on the disk of " in status.reason
    assert saved_iterations(run) == []
