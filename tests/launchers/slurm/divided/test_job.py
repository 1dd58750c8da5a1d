"""The jobs of a preparation as SLURM starts them, in this process."""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from quantexp_launchers.slurm.divided import job as on_node
from quantexp_launchers.slurm.divided.plan import planned_work, read_plan

from quantexp.cli.main import main
from quantexp.data.prepare.divided import DividedPreparation
from quantexp.data.prepared import read_card
from quantexp.runs.paths import Submission
from tests.data.prepare.made import content_of, lines, rows, texts

from .conftest import Cluster

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _submitted(submit: Callable[..., list[str]]) -> None:
    submit("launcher.cpus_per_process=1")


def error(capsys: Captured) -> str:
    """The last line of standard error, without time and name."""
    return capsys.readouterr().err.splitlines()[-1].partition(": ")[2]


def test_tasks_and_join_write_the_bytes_of_one_process(
    job: Callable[..., int], cluster: Cluster, capsys: Captured
) -> None:
    for task in (2, 0, 1):
        assert job("make", task) == 0
        assert capsys.readouterr().err.startswith("1 of 3 inputs: ")
    (Path("raw") / "later.jsonl").write_bytes(lines(rows(texts(5))))
    assert job("join") == 0
    assert f"data  {Path.cwd()}/data/dolma.bin" in capsys.readouterr().out
    (Path("raw") / "later.jsonl").unlink()
    assert main([*cluster.words, "dataset.path=alone/dolma"]) == 0
    assert content_of(Path("data/dolma")) == content_of(Path("alone/dolma"))
    card = read_card(Path("data/dolma"))
    assert card is not None
    assert card.report["source"] == ["raw"], "as typed, although the job runs elsewhere"


def test_the_result_has_the_umask_of_the_submitter(job: Callable[..., int]) -> None:
    os.umask(0o077)
    assert job("join") == 0
    assert stat.S_IMODE(Path("data/dolma.bin").stat().st_mode) == 0o644


def test_the_warning_before_the_time_limit_ends_nothing(job: Callable[..., int]) -> None:
    assert job("make", 0) == 0
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


@pytest.mark.parametrize(("restarts", "code"), [("3", 0), ("4", 1)])
def test_a_task_is_started_again_only_so_often(
    job: Callable[..., int],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    restarts: str,
    code: int,
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert job("make", 0) == code
    if code:
        assert error(capsys) == (
            "SLURM has started this task again 4 times, more than launcher.max_requeue=3; run the same quantexp "
            "prepare again, it resumes where this one stopped"
        )


def test_changed_input_ends_the_job(job: Callable[..., int], capsys: Captured) -> None:
    os.utime("raw/1.jsonl", ns=(1, 1))
    assert job("make", 0) == 1
    assert error(capsys) == (
        f"the input of {Path.cwd()}/data/dolma has changed since the submission: run the same "
        "quantexp prepare again"
    )


def test_missing_snapshot_ends_the_job(job: Callable[..., int], capsys: Captured) -> None:
    shutil.rmtree("runs/snapshots")
    assert job("join") == 1
    assert error(capsys).startswith("the source this run was submitted with is gone from")


def test_node_without_the_working_directory_is_named(
    job: Callable[..., int], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path.cwd()
    chdir = os.chdir

    def refuse(path: str) -> None:
        if Path(path) == here:
            raise FileNotFoundError(2, "No such file or directory")
        chdir(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "chdir", refuse)
        assert on_node.main(["join", str(next(Path("runs/submissions").iterdir()))]) == 1
    assert error(capsys) == (
        f"{here}, where the command was typed, cannot be entered on this node: No such file or directory; "
        "submit it from a folder that all nodes have"
    )


def test_missing_plan_ends_the_job(capsys: Captured, tmp_path: Path) -> None:
    assert on_node.main(["join", str(tmp_path)]) == 1
    assert error(capsys) == f"{tmp_path}/plan.json is missing"


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        ([], 6),
        (["launcher.cpus_per_process=3"], 3),
        (["launcher.cpus_per_process=3", "dataset.prepare.num_workers=2"], 2),
    ],
)
def test_processes_follow_the_cores_of_the_task(
    cluster: Cluster, submit: Callable[..., list[str]], words: list[str], workers: int
) -> None:
    submit("dataset.path=other", *words)
    folder = Path("runs/submissions") / cluster.names()[-1]
    plan = read_plan(Submission(folder))
    work = planned_work(plan, Submission(folder), num_cores=6)
    assert isinstance(work, DividedPreparation)
    assert work.job.num_workers == workers
