"""Old checkpoints are removed, and a folder with a final name is whole at every moment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quantexp.model.checkpoints import folder_of, saved_iterations
from quantexp.model.retention import remove_others
from quantexp.runs.paths import RunDir
from quantexp.schema import CheckpointConfig


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
