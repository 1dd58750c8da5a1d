"""resume and retry: which runs start again, and that each is still the same run."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from quantexp.cli import resume
from quantexp.cli.resume import failed, interrupted, start_again
from quantexp.config.load import plain
from quantexp.errors import ConfigError, RunError
from quantexp.launch.attempt import open_run
from quantexp.launch.recorded import with_absolute_paths
from quantexp.model.checkpoints import STATE, STATE_INDEX, folder_of
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status, write_status
from quantexp.schema import Experiment

QUIET = Console(quiet=True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Experiment, int]]:
    """The points that would run here."""
    points: list[tuple[Experiment, int]] = []

    def run_points(sweep: list[tuple[Experiment, int]], console: Console) -> int:
        points.extend(sweep)
        return 0

    monkeypatch.setattr("quantexp_launchers.local.submit.run_points", run_points)
    return points


@pytest.fixture
def left(tiny: Callable[..., Experiment]) -> Callable[..., RunDir]:
    """Leaves the folder of a run in this state."""

    def leave(state: State, *overrides: str, started: bool = True) -> RunDir:
        with open_run(tiny(*overrides), "cpu", ["test"]) as (folder, _):
            status = read_status(folder.run.status)
            assert status is not None
            began = "2026-01-01T00:00:00+00:00" if started else None
            write_status(folder.run.status, replace(status, state=state, started=began))
        return folder.run

    return leave


def seeds(points: list[tuple[Experiment, int]]) -> list[int]:
    return sorted(experiment.training.seed for experiment, _ in points)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def one_of_each(left: Callable[..., RunDir]) -> None:
    """A run in every state; its seed is the state's number."""
    for seed, state in enumerate(State):
        left(state, f"training.seed={seed}", started=state is not State.PENDING)


@pytest.mark.usefixtures("one_of_each")
def test_resume_takes_unfinished_runs_alone(
    root: Path, launched: list[tuple[Experiment, int]]
) -> None:
    assert start_again(None, root, interrupted, [], QUIET) == 0
    states = [list(State)[seed] for seed in seeds(launched)]
    assert states == [State.PENDING, State.RUNNING, State.PREEMPTED, State.CANCELLED]


@pytest.mark.usefixtures("one_of_each")
def test_retry_takes_failed_runs_alone(root: Path, launched: list[tuple[Experiment, int]]) -> None:
    assert start_again(None, root, failed, [], QUIET) == 0
    assert [list(State)[seed] for seed in seeds(launched)] == [State.FAILED]


def test_run_is_the_same_except_for_its_launcher(
    left: Callable[..., RunDir],
    tiny: Callable[..., Experiment],
    root: Path,
    launched: list[tuple[Experiment, int]],
) -> None:
    left(State.CANCELLED, "quant=FA_mxfp8")
    start_again(None, root, interrupted, ["launcher.num_threads=1"], QUIET)
    ((experiment, _),) = launched
    assert experiment == with_absolute_paths(tiny("quant=FA_mxfp8", "launcher.num_threads=1"))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "training.lr=1",
            r"training\.lr=1 would make it another run; .* only launcher\.KEY, parallel\.KEY",
        ),
        ("launcher.num_threads=x", r"launcher\.num_threads=x: Value 'x' .* could not be converted"),
        ("launcher.nothing=1", r"launcher\.nothing=1: Key 'nothing' not in 'LauncherConfig'"),
        ("launcher.num_threads=0", r"launcher\.num_threads must be at least 1, got 0"),
        ("launcher.kind=pbs", r"launcher\.kind must be one of local, slurm, got 'pbs'"),
    ],
)
def test_other_changes_are_refused(
    left: Callable[..., RunDir], root: Path, word: str, message: str
) -> None:
    left(State.CANCELLED)
    words = [word, f"paths.root={root}"]
    with pytest.raises(ConfigError, match=message):
        resume.run(argparse.Namespace(verb="resume", words=words))


TWO_SHARE = ("training.global_batch_size=2", "training.micro_batch_size=1")


def test_run_whose_numerics_changed_is_refused(left: Callable[..., RunDir], root: Path) -> None:
    run = left(State.CANCELLED, *TWO_SHARE)
    recorded = json.loads(run.provenance.read_text())
    recorded["identity"]["numerics"] -= 1
    run.provenance.write_text(json.dumps(recorded))
    with pytest.raises(RunError, match=r"would be another run now \(.*\): its data, device or the"):
        start_again(None, root, interrupted, ["launcher.num_processes=2"], QUIET)


def test_other_layout_needs_a_checkpoint(left: Callable[..., RunDir], root: Path) -> None:
    left(State.CANCELLED, *TWO_SHARE)
    with pytest.raises(RunError, match="has no checkpoint to go on from in another layout; start"):
        start_again(None, root, interrupted, ["launcher.num_processes=2"], QUIET)


def test_run_keeps_its_folder_in_another_layout_and_leaves_the_first_one_alone(
    left: Callable[..., RunDir], root: Path, launched: list[tuple[Experiment, int]]
) -> None:
    run = left(State.CANCELLED, *TWO_SHARE)
    state = folder_of(run, 1) / STATE
    state.mkdir(parents=True)
    (state / STATE_INDEX).write_text("{}")
    console = Console(record=True, width=160)
    start_again(None, root, interrupted, ["launcher.num_processes=2"], console)
    assert "1 run goes on from the last checkpoint" in console.export_text()
    start_again(None, root, interrupted, ["launcher.num_threads=1"], QUIET)
    (other, _), (same, _) = launched
    assert (other.paths.run, other.launcher.num_processes) == (run.root.name, 2)
    assert same.paths.run is None


def test_nothing_to_start_is_an_error(left: Callable[..., RunDir], root: Path) -> None:
    run = left(State.COMPLETED)
    with pytest.raises(
        RunError, match=f"nothing to start again in {run.root}; see quantexp status"
    ):
        start_again(str(run.root), root, interrupted, [], QUIET)


def sweep_of(root: Path, entries: list[dict[str, object]]) -> Path:
    file = root / "sweeps" / "20260101.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"started": "2026-01-01", "runs": entries}))
    return file


def test_run_that_vanished_from_a_sweep_is_created_again(
    left: Callable[..., RunDir],
    tiny: Callable[..., Experiment],
    root: Path,
    launched: list[tuple[Experiment, int]],
) -> None:
    run = left(State.COMPLETED)
    config = plain(with_absolute_paths(tiny()))
    file = sweep_of(root, [{"run": run.root.name, "stage": 1, "config": config}])
    shutil.rmtree(run.root)
    start_again(str(file), root, interrupted, [], QUIET)
    assert launched == [(with_absolute_paths(tiny()), 1)]


def test_vanished_run_without_a_configuration_is_named(root: Path) -> None:
    file = sweep_of(root, [{"run": "llama_wikipedia_bf16-12345678"}])
    with pytest.raises(
        RunError, match=r"llama_wikipedia_bf16-12345678 in .* has neither a folder nor a co"
    ):
        start_again(str(file), root, interrupted, [], QUIET)


def test_message_says_that_runs_begin_at_the_first_iteration(
    left: Callable[..., RunDir],
    root: Path,
    launched: list[tuple[Experiment, int]],
) -> None:
    left(State.CANCELLED)
    console = Console(record=True, width=160)
    start_again(None, root, interrupted, [], console)
    assert "1 run starts at the first iteration" in console.export_text()
    assert len(launched) == 1


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED])
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_moved_or_copied_folder_is_the_run(
    left: Callable[..., RunDir],
    root: Path,
    launched: list[tuple[Experiment, int]],
    state: State,
    copies: bool,
    whole: bool,
) -> None:
    run = left(state)
    there = root.parent / "elsewhere"
    there.mkdir()
    before, after = (root, there / "b") if whole else (run.root, there / run.root.name)
    (shutil.copytree if copies else shutil.move)(before, after)
    named = after / run.root.name if whole else after
    start_again(str(named), root, failed if state is State.FAILED else interrupted, [], QUIET)
    ((experiment, _),) = launched
    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        assert folder.run.root == named
    assert run.root.exists() == copies


def test_renamed_folder_keeps_its_name_with_and_without_checkpoints(
    left: Callable[..., RunDir], root: Path, launched: list[tuple[Experiment, int]]
) -> None:
    run = left(State.FAILED)
    run.root.rename(root / "mine")
    (root / "link").symlink_to("mine")
    for word in ("mine", "link"):
        start_again(str(root / word), root, failed, [], QUIET)
    for experiment, _ in launched:
        with open_run(experiment, "cpu", ["test"]) as (folder, _):
            assert folder.run.root == root / "mine"
    assert len(launched) == 2


def test_run_that_vanished_from_a_moved_sweep_is_created_beside_it(
    left: Callable[..., RunDir],
    tiny: Callable[..., Experiment],
    root: Path,
    launched: list[tuple[Experiment, int]],
) -> None:
    run = left(State.COMPLETED)
    config = plain(with_absolute_paths(tiny()))
    file = sweep_of(
        root, [{"run": run.root.name, "config": config}, {"run": None, "config": config}]
    )
    shutil.rmtree(run.root)
    moved = root.rename(root.parent / "moved")
    start_again(str(moved / file.relative_to(root)), moved, interrupted, [], QUIET)
    assert [experiment.paths.root for experiment, _ in launched] == [str(moved)] * 2


def test_copy_that_would_write_into_the_captures_of_its_original_is_refused(
    left: Callable[..., RunDir],
    root: Path,
    tmp_path: Path,
    launched: list[tuple[Experiment, int]],
) -> None:
    shared = tmp_path / "captures"
    run = left(State.FAILED, f"capture.dir={shared}", "capture=stats")
    (shared / run.root.name).mkdir(parents=True)
    shutil.copytree(root, tmp_path / "copy")
    start_again(str(tmp_path / "copy"), root, failed, [], QUIET)
    ((experiment, _),) = launched
    with (
        pytest.raises(RunError, match=r"copy of .*, whose captured tensors are in .*; start it"),
        open_run(experiment, "cpu", ["test"]),
    ):
        pass
    shutil.rmtree(root)
    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        assert folder.ready
