"""Submissions that are refused, or taken back as a whole."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from quantexp_launchers.slurm import submit
from quantexp_launchers.slurm.batch import Batch
from quantexp_launchers.slurm.submit import check_root, planned, send

from quantexp.errors import ConfigError, DataError, RunError
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, write_status
from tests.recorded import status_of

from .conftest import QUIET, Point, Slurm


def test_points_with_different_folders_are_refused(
    slurm: Slurm, point: Point, tmp_path: Path
) -> None:
    other = point(2)[0]
    other.paths = replace(other.paths, root=str(tmp_path / "others"))
    with pytest.raises(ConfigError) as caught:
        send([point(1), (other, 0)], QUIET)
    assert str(caught.value) == (
        "paths.root must be one folder for all runs that are submitted together, got "
        f"{tmp_path / 'others'}, {tmp_path / 'runs'}"
    )


def test_points_of_the_same_run_are_refused(slurm: Slurm, point: Point) -> None:
    with pytest.raises(ConfigError) as caught:
        send([point(1), point(1, time_min=5)], QUIET)
    assert str(caught.value).startswith(
        "several points are the same run (llama32-1b_wikipedia_bf16-"
    )
    assert str(caught.value).endswith("; leave out all but one of each")


@pytest.mark.parametrize("root", ["/a%jb", "/a\\b", "/a\nb", "/a\tb"])
def test_folder_that_a_script_cannot_name_is_refused(slurm: Slurm, point: Point, root: str) -> None:
    experiment, _ = point(1)
    experiment.paths = replace(experiment.paths, root=root)
    for use in (lambda: send([(experiment, 0)], QUIET), lambda: planned(experiment, Path("x"))):
        with pytest.raises(ConfigError) as caught:
            use()
        assert str(caught.value) == (
            f"paths.root must not hold {root[2]!r} under SLURM, got {root!r}; choose another folder"
        )


def test_comma_is_refused_only_where_it_would_divide_mounts(point: Point) -> None:
    check_root(Path("/a,b"), [point(1)[0].launcher])
    with pytest.raises(ConfigError, match=r"paths\.root must not hold ',' under SLURM"):
        check_root(Path("/a,b"), [point(1, container="x.sif")[0].launcher])


def test_request_that_slurm_refuses_leaves_nothing(
    slurm: Slurm, point: Point, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses(batch: Batch) -> None:
        raise RunError("SLURM refuses the job: too much")

    monkeypatch.setattr(submit, "check_batch", refuses)
    with pytest.raises(RunError, match="too much"):
        send([point(1)], QUIET)
    assert not (tmp_path / "runs").exists()


def test_missing_data_is_an_error_before_any_run_is_sent(slurm: Slurm, point: Point) -> None:
    experiment, _ = point(2)
    experiment.dataset = replace(experiment.dataset, sample=False, path=None)
    with pytest.raises(DataError, match="has no data"):
        send([point(1), (experiment, 0)], QUIET)
    assert not slurm.sent


@pytest.mark.parametrize(
    ("error", "why"),
    [(RunError("SLURM refuses the job: no more"), "SLURM refuses the job: no more"),
     (KeyboardInterrupt(), "KeyboardInterrupt")],
)  # fmt: skip
def test_all_arrays_are_withdrawn_if_one_is_refused(
    slurm: Slurm, point: Point, error: BaseException, why: str, tmp_path: Path
) -> None:
    def second_is_refused(batch: Batch) -> None:
        if slurm.sent:
            raise error

    slurm.on_submit = second_is_refused
    with pytest.raises(type(error)):
        send([point(1), point(2, time_min=5), point(3, time_min=7)], QUIET)
    first, second = sorted(path.name for path in (tmp_path / "runs" / "submissions").iterdir())
    assert slurm.cancelled == [f"--name={first}", f"--name={second}"]
    folders = list((tmp_path / "runs").glob("llama*"))
    assert len(folders) == 3
    for folder in folders:
        status = status_of(RunDir(folder))
        assert (status.submission, status.task, status.job_id) == (None, None, None)
        assert (status.state, status.reason) == (State.CANCELLED, f"not submitted: {why}")
    slurm.on_submit = lambda _: None
    sent, _ = send([point(1), point(2, time_min=5), point(3, time_min=7)], QUIET)
    assert len(sent) == 3
    assert all(one.job_id for one in sent)
    assert not list((tmp_path / "runs").glob("llama*/attempts")), "it had never started"


def test_all_is_taken_back_on_a_full_disk_too(
    slurm: Slurm, point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_status_of_cancelled(file: Path, status: Status) -> None:
        if status.state is State.CANCELLED:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_status(file, status)

    def second_is_refused(batch: Batch) -> None:
        if slurm.sent:
            raise RunError("SLURM refuses the job: no more")

    monkeypatch.setattr(submit, "write_status", write_status_of_cancelled)
    slurm.on_submit = second_is_refused
    with pytest.raises(RunError, match="no more"):
        send([point(1), point(2, time_min=5)], QUIET)
    assert len(slurm.cancelled) == 2


def test_submissions_that_cannot_be_written_are_a_clean_error(
    slurm: Slurm, point: Point, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "submissions").write_text("in the way")
    with pytest.raises(RunError, match=r"submissions/quantexp-.* cannot be written: .*; set paths"):
        send([point(1)], QUIET)
