"""The paths of a recorded experiment whose folder was moved or copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.errors import ConfigError
from quantexp.launch.recorded import in_place, root_of, with_absolute_paths
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment


def recorded(experiment: Experiment, project: Path) -> Experiment:
    """An experiment in `project/runs` with a path of each kind."""
    experiment.paths.root = str(project / "runs")
    experiment.capture.dir = str(project / "captures")
    experiment.model.init_from = str(project / "runs" / "first" / "checkpoints")
    experiment.training.start_from = f"{project}/runs/first@4"
    experiment.evaluate.task_folder = str(project.parent / "tasks")
    return with_absolute_paths(experiment)


def test_all_that_moved_with_the_folder_is_found_there_and_nothing_else(
    tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "deep" / "new"
    before = recorded(tiny(), old)
    for folder in (new / "runs" / "first" / "checkpoints", new / "captures", tmp_path / "tasks"):
        folder.mkdir(parents=True)
    expected = recorded(tiny(), new)
    expected.evaluate.task_folder = before.evaluate.task_folder
    assert in_place(before, RunDir(new / "runs" / "second")) == expected
    shutil.rmtree(new / "captures")
    assert in_place(before, RunDir(new / "runs" / "second")).capture.dir == str(old / "captures")


def test_folder_that_did_not_move_keeps_its_words(
    tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    before = recorded(tiny(), tmp_path / "old")
    (tmp_path / "old" / "runs").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "old")
    assert in_place(before, RunDir(tmp_path / "link" / "runs" / "second")) == before


@pytest.mark.parametrize(
    ("section", "key", "path", "words"),
    [
        (
            "paths",
            "root",
            "a:b",
            r"paths\.root must not hold ':', which divides the search path of",
        ),
        (
            "paths",
            "root",
            "a\udcff",
            r"paths\.root must be a path in UTF-8, got '/.*a\\udcff'; rename",
        ),
        ("paths", "run", "a\udcff", r"paths\.run must be a path in UTF-8"),
        ("capture", "dir", "a\udcff", r"capture\.dir must be a path in UTF-8"),
        ("dataset", "path", "a\udcff", r"dataset\.path must be a path in UTF-8"),
    ],
)
def test_path_that_no_process_of_a_run_can_be_given_is_refused(
    tiny: Callable[..., Experiment], section: str, key: str, path: str, words: str
) -> None:
    experiment = tiny()
    setattr(getattr(experiment, section), key, path)
    with pytest.raises(ConfigError, match=words):
        root_of(experiment)


def test_relative_folder_of_runs_takes_the_working_directory_with_it(
    tiny: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "12:30").mkdir()
    monkeypatch.chdir(tmp_path / "12:30")
    with pytest.raises(ConfigError, match=r"got '/.*12:30/runs'; choose another folder"):
        root_of(tiny("paths.root=runs"))
    assert root_of(tiny(f"paths.root={tmp_path}")) == tmp_path
