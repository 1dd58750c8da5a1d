"""When a run saves its model, and that it does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantexp.errors import ConfigError, DataError, RunError
from quantexp.launch.attempt import open_run
from quantexp.model.checkpoints import (
    checkpoint_bytes,
    folder_of,
    iterations_saved,
    kept,
    most_at_once,
    remove_others,
    require_published,
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
    assert iterations_saved(CheckpointConfig(every, at_end=at_end), 10) == saved


def test_interval_that_saves_nothing_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.every must be at least 1, got 0"):
        tiny("checkpoint.every=0")
    with pytest.raises(
        ConfigError, match=r"checkpoint\.every must be at most training\.iterations=2, got 3; ch"
    ):
        tiny("checkpoint.every=3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["checkpoint.every=1", "checkpoint.keep_every=2"],
            r"checkpoint\.keep_every=2 needs checkpoint\.keep_last=N: without it all stay",
        ),
        (
            ["checkpoint.every=1", "checkpoint.publish=false"],
            r"checkpoint\.publish=false needs checkpoint\.optimizer=true: a checkpoint without both has",
        ),
        (["checkpoint.keep_last=0"], r"checkpoint\.keep_last must be at least 1, got 0"),
        (
            ["checkpoint.keep_last=1", "checkpoint.keep_every=0"],
            r"checkpoint\.keep_every must be at least 1, got 0",
        ),
    ],
)
def test_keys_that_would_do_nothing_are_refused(tiny: Tiny, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*words)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left", "most"),
    [(None, None, 10, 10), (3, None, 3, 4), (1, 5, 2, 3), (2, 5, 3, 4), (20, None, 10, 10)],
)
def test_checkpoints_that_stay_and_that_are_there_at_once(
    keep_last: int | None, keep_every: int | None, left: int, most: int
) -> None:
    """Counted by removing after each save what does not stay."""
    checkpoint = CheckpointConfig(1, keep_last=keep_last, keep_every=keep_every)
    there: list[int] = []
    at_once = 0
    for iteration in range(1, 11):
        there.append(iteration)
        at_once = max(at_once, len(there))
        there = kept(checkpoint, there)
    assert kept(checkpoint, range(1, 11)) == there
    assert (len(there), at_once) == (left, most)
    assert most_at_once(checkpoint, range(1, 11)) == at_once
    assert most_at_once(checkpoint, []) == 0


def test_a_folder_without_published_weights_is_refused_with_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "iteration_00000003"
    (folder / "state").mkdir(parents=True)
    with pytest.raises(
        DataError,
        match=r"model\.init_from=x is a checkpoint without published weights \(checkpoint\.publish=false\): give the "
        rf"folder that quantexp export {tmp_path} format=hf iteration=3 writes",
    ):
        require_published(folder, "model.init_from=x")
    (folder / "model.safetensors").write_text("")
    require_published(folder, "model.init_from=x")
    require_published(tmp_path / "weights", "model.init_from=x")


@pytest.mark.slow
def test_run_that_keeps_one_checkpoint_is_skipped_with_it(run_tiny: RunTiny, tiny: Tiny) -> None:
    words = ["capture=off", "checkpoint.every=1", "checkpoint.keep_last=1"]
    run = run_tiny(*words)
    assert saved_iterations(run) == [2]
    with open_run(tiny(*words), "cpu", ["test"]) as (again, _):
        assert again.skipped is not None
    with open_run(tiny("capture=off", "checkpoint.every=1"), "cpu", ["test"]) as (again, _):
        assert again.skipped is None, "the first iteration's is asked for"


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
        match=r"2 checkpoints would take 0\.00\d+ GB, and .* has 1e-06 GB free; raise checkpoint\.every, set "
        r"checkpoint\.keep_last=N, or",
    ):
        require_room(tiny("checkpoint.every=1"), tmp_path)
    require_room(tiny(), tmp_path)
    for words, number in [
        (["checkpoint.optimizer=true"], 4),
        (["checkpoint.optimizer=true", "checkpoint.keep_last=1"], 2),
        ([], 5),  # the shards of one, until its published form is made
    ]:
        experiment = tiny("checkpoint.every=1", "training.iterations=4", *words)
        Usage.free = number * checkpoint_bytes(experiment)
        require_room(experiment, tmp_path)
        Usage.free -= 1
        with pytest.raises(RunError):
            require_room(experiment, tmp_path)


@pytest.mark.slow
def test_disk_that_fills_up_fails_the_run_with_the_reason(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantexp.model.checkpoint_hashes._write", fails)
    run = run_tiny("checkpoint.at_end=true", "capture=off", expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert (
        "iteration_00000002/state/rank00000.safetensors cannot be written (No space left on device: "
        in status.reason
    )
    assert "are free); free some space on the disk of " in status.reason
    assert saved_iterations(run) == []


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with checkpoints of iterations 1 to 6."""
    run = RunDir(tmp_path)
    for iteration in range(1, 7):
        state = folder_of(run, iteration) / "state"
        state.mkdir(parents=True)
        (state / "state.json").write_text(str(iteration))
    return run


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (None, None, [1, 2, 3, 4, 5, 6]),
        (2, None, [5, 6]),
        (1, 3, [3, 6]),
        (2, 2, [2, 4, 5, 6]),
        (9, None, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_newest_and_the_multiples_stay(
    run: RunDir, keep_last: int | None, keep_every: int | None, left: list[int]
) -> None:
    checkpoint = CheckpointConfig(1, keep_last=keep_last, keep_every=keep_every)
    remove_others(run, checkpoint, 6)
    assert saved_iterations(run) == left
    names = sorted(path.name for path in run.checkpoints.iterdir())
    assert names == [folder_of(run, i).name for i in left], "nothing is left under another name"


def test_checkpoints_of_later_iterations_neither_count_nor_go(run: RunDir) -> None:
    """A run that goes on from an earlier iteration may have them."""
    remove_others(run, CheckpointConfig(1, keep_last=1), 4)
    assert saved_iterations(run) == [4, 5, 6]


def test_a_kill_in_the_middle_leaves_a_hidden_folder_that_the_next_removal_deletes(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree

    def killed(path: Path) -> None:
        (path / "state" / "state.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_others(run, CheckpointConfig(1, keep_last=5), 6)
    assert saved_iterations(run) == [2, 3, 4, 5, 6]
    for iteration in saved_iterations(run):
        assert (folder_of(run, iteration) / "state" / "state.json").is_file()
    hidden = run.checkpoints / ".iteration_00000001.removed"
    assert hidden.is_dir()
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    remove_others(run, CheckpointConfig(1), 6)
    assert not hidden.exists()
    assert saved_iterations(run) == [2, 3, 4, 5, 6]
