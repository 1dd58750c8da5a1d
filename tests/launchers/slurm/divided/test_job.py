"""The jobs of a preparation as SLURM starts them."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.data.prepared import read_card
from quantexp.processes.machine import CORES, num_cores
from tests.data.prepare.made import content_of, lines, rows, texts

from .conftest import Cluster, Ended

RunJob = Callable[..., Ended]


@pytest.fixture(autouse=True)
def _submitted(submit: Callable[..., list[str]]) -> None:
    submit("launcher.cpus_per_process=1")


def test_tasks_and_the_last_job_write_the_bytes_of_one_process(
    job: RunJob, cluster: Cluster
) -> None:
    for task in (2, 0, 1):
        ended = job(task)
        assert ended.returncode == 0
        assert ended.stderr.startswith("1 of 3 inputs: ")
    (Path("raw") / "later.jsonl").write_bytes(lines(rows(texts(5))))
    ended = job()
    assert ended.returncode == 0
    assert f"data  {Path.cwd()}/data/dolma.bin" in ended.stdout
    (Path("raw") / "later.jsonl").unlink()
    assert main([*cluster.words, "dataset.path=alone/dolma"]) == 0
    assert content_of(Path("data/dolma")) == content_of(Path("alone/dolma"))
    card = read_card(Path("data/dolma"))
    assert card is not None
    assert card.report["source"] == ["raw"], "as typed, although the job runs elsewhere"


def test_the_result_has_the_umask_of_the_submitter(job: RunJob) -> None:
    before = os.umask(0o077)
    try:
        assert job().returncode == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path("data/dolma.bin").stat().st_mode) == 0o644


@pytest.mark.parametrize(("restarts", "code"), [("3", 0), ("4", 1)])
def test_a_task_is_started_again_only_so_often(job: RunJob, restarts: str, code: int) -> None:
    ended = job(0, SLURM_RESTART_COUNT=restarts)
    assert ended.returncode == code
    if code:
        assert ended.stderr == (
            "quantexp: SLURM has started this task again 4 times, more than launcher.max_requeue=3; run the same "
            "quantexp prepare again: it makes only what is missing\n"
        )


def test_changed_input_ends_the_job(job: RunJob) -> None:
    os.utime("raw/1.jsonl", ns=(1, 1))
    ended = job(0)
    assert ended.returncode == 1
    assert ended.stderr == (
        f"quantexp: the input of {Path.cwd()}/data/dolma has changed since the submission: run the same quantexp "
        "prepare again\n"
    )


def test_missing_snapshot_ends_the_job(job: RunJob) -> None:
    shutil.rmtree("runs/snapshots")
    ended = job()
    assert ended.returncode == 1
    assert ended.stderr.startswith("quantexp: the source this run was submitted with is gone from")


def test_node_without_the_working_directory_is_named(job: RunJob, cluster: Cluster) -> None:
    file = Path("runs/submissions") / cluster.names()[-1] / "plan.json"
    file.write_text(json.dumps(cluster.plan() | {"directory": "/nowhere"}))
    ended = job()
    assert ended.returncode == 1
    assert ended.stderr == (
        "quantexp: /nowhere, where the command was typed, cannot be entered on this node: No such file or directory; "
        "submit it from a folder that all nodes have\n"
    )


def test_missing_plan_ends_the_job(job: RunJob, cluster: Cluster) -> None:
    file = (Path("runs/submissions") / cluster.names()[-1] / "plan.json").absolute()
    file.unlink()
    ended = job()
    assert ended.returncode == 1
    assert ended.stderr == f"quantexp: {file} is missing\n"


@pytest.mark.parametrize(("words", "number"), [([], 6), (["launcher.cpus_per_process=3"], 3)])
def test_a_job_knows_its_cores_and_the_warning_before_the_time_limit_does_not_end_it(
    cluster: Cluster, submit: Callable[..., list[str]], job: RunJob, words: list[str], number: int
) -> None:
    submit("dataset.path=other", *words)
    file = Path("runs/submissions") / cluster.names()[-1] / "plan.json"
    code = (
        "import os, signal; from quantexp.processes.machine import num_cores; "
        "os.kill(os.getpid(), signal.SIGUSR2); print(num_cores())"
    )
    file.write_text(json.dumps(cluster.plan() | {"command": ["-c", code]}))
    ended = job(SLURM_CPUS_ON_NODE="6")
    assert (ended.returncode, ended.stdout) == (0, f"{number}\n")


def test_a_job_s_cores_are_those_that_its_launcher_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES, "3")
    assert num_cores() == 3
    monkeypatch.delenv(CORES)
    assert num_cores() == len(os.sched_getaffinity(0))
