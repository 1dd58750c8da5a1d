"""A requantise divided among jobs: what is sent, that the result is that of one process, and what is done again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantexp.cli.main import main
from quantexp.extras.requantise import kept
from quantexp.extras.requantise.passing import FileScores, score_file
from tests.extras.requantise.conftest import linear, write_capture
from tests.launchers.slurm.conftest import FakeSlurm, queue_line

from .conftest import Cluster

Captured = pytest.CaptureFixture[str]
Submit = Callable[..., list[str]]
RunJob = Callable[..., int]
FEW = ("--formats", "mxfp4", "--elements", "1024")
OUTPUTS = (
    *("requantise.csv", "requantise.json", "scale_exponent.csv", "scale_exponent.png"),
    *("scale_exponent.svg", "quant/recommended.yaml"),
)


@pytest.fixture
def cluster(in_tmp: Path, clients: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Two layers of operands, one tensor without an SQNR and one with an infinite one; two tensors are a task."""
    odd = {("fc2", "input", 0): torch.zeros(64, 2, 32), ("fc2", "input", 1): torch.ones(64, 2, 32)}
    write_capture(in_tmp / "run" / "tensors", {**linear(0), **linear(1), **odd})
    monkeypatch.setattr("quantexp.processes.groups.MIN_PIECES", 2)
    return Cluster(clients, ["requantise", "run", *FEW, "--out", "own"])


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that are scored from now on."""
    labels: list[str] = []

    def score_and_note(*arguments: object) -> FileScores:
        scores = score_file(*arguments)  # type: ignore[arg-type]
        labels.append(scores.entry.label)
        return scores

    monkeypatch.setattr(kept, "score_file", score_and_note)
    return labels


def alone(*words: str) -> str:
    """What the command does on this machine, into `alone`."""
    shutil.rmtree("alone", ignore_errors=True)
    assert main(["requantise", "run", *FEW, "--out", "alone", *words]) == 0
    return "alone"


def same(out: str = "own", expected: str = "alone") -> bool:
    """Whether all files of two output folders are the same to the byte."""
    return all(
        (Path(out) / name).read_bytes() == (Path(expected) / name).read_bytes() for name in OUTPUTS
    )


def test_an_array_scores_the_tensors_and_a_job_after_it_joins_them(
    cluster: Cluster, submit: Submit
) -> None:
    output = submit("launcher.max_parallel=2", "launcher.cpus_per_process=4")
    (name,) = cluster.names()
    assert name.startswith("requantise-")
    assert output == [
        "submitted 4 tasks as the array 7, for 8 tensors, at most 2 at a time",
        "submitted job 8, which joins their outputs after the last of them",
        "result own",
        f"logs runs/submissions/{name}",
        f"follow squeue --name={name}",
        f"tail -n 1 runs/submissions/{name}/*.err",
        f"stop scancel --name={name}",
        "resume the same command: it makes only what is missing",
    ]
    assert "slurm.divided.job make" in cluster.sent()[0]
    assert "slurm.divided.job join" in cluster.sent()[1]
    assert not Path("own").exists()


def test_tasks_and_join_write_the_bytes_and_print_the_table_of_one_process(
    submit: Submit, job: RunJob, scored: list[str], capsys: Captured
) -> None:
    submit("launcher.cpus_per_process=1")
    for task in (2, 0, 3, 1):
        assert job("make", task) == 0
        assert capsys.readouterr().err.splitlines()[-1] == "2 of 8 tensors are scored"
    assert len(scored) == 8
    assert job("join") == 0
    table = capsys.readouterr().out
    assert len(scored) == 8, "the last job scores nothing again"
    alone()
    assert same()
    assert table.replace(f"{Path.cwd()}/own", "own") == capsys.readouterr().out.replace(
        "alone", "own"
    )
    assert not Path("own.partial").exists()


def test_a_killed_task_goes_on_where_it_was(
    submit: Submit, job: RunJob, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    submit("launcher.cpus_per_process=1")
    done: list[str] = []

    def killed(*arguments: object) -> FileScores:
        if done:
            raise KeyboardInterrupt
        done.append("one")
        return score_file(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(kept, "score_file", killed)
        with pytest.raises(KeyboardInterrupt):
            job("make", 0)
    (first,) = Path("own.partial").glob("*/*.npz")
    written = first.stat().st_ino
    capsys.readouterr()
    assert job("make", 0) == 0
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "resuming: 1 of 2 tensors are scored",
        "2 of 8 tensors are scored",
    ]
    assert first.stat().st_ino == written


def test_the_same_command_submits_what_is_missing_and_names_the_logs_of_tasks_that_did_not_finish(
    cluster: Cluster, submit: Submit, job: RunJob
) -> None:
    submit()
    (name,) = cluster.names()
    for task in (0, 2):
        assert job("make", task) == 0
    for task in range(4):
        (Path("runs/submissions") / name / f"7_{task}_0_log.err").touch()
    output = submit()
    assert output[0] == "submitted 2 tasks as the array 9, for 4 of 8 tensors"
    assert output[4:7] == [
        f"runs/submissions/{name} (the jobs before)",
        f"runs/submissions/{name}/7_1_0_log.err (did not finish)",
        f"runs/submissions/{name}/7_3_0_log.err (did not finish)",
    ]
    for task in range(2):
        assert job("make", task) == 0
    (Path("runs/submissions") / cluster.names()[-1] / "10_0_log.err").touch()
    output = submit()
    assert output[0] == "submitted job 11"
    assert output[4] == f"runs/submissions/{cluster.names()[1]}/10_0_log.err (did not finish)"
    assert job("join") == 0
    alone()
    assert same()


def test_one_job_does_what_is_too_little_for_tasks(submit: Submit, job: RunJob) -> None:
    assert submit("layer=0", "--jobs", "1")[0] == "submitted 2 tasks as the array 7, for 4 tensors"
    assert submit("layer=0", "tensor=w*", "--out", "other")[0] == "submitted job 9"
    assert job("join") == 0
    alone("layer=0", "tensor=w*")
    assert same("other")


def test_scores_that_are_damaged_or_of_another_file_are_computed_again(
    submit: Submit, job: RunJob, scored: list[str]
) -> None:
    submit()
    for task in range(4):
        assert job("make", task) == 0
    before = len(scored)
    next(Path("own.partial").glob("*/*.npz")).write_bytes(b"damaged")
    changed = Path("run/tensors/bf16/0_fc1_input.pt")
    os.utime(changed, ns=(1, 1))
    assert job("join") == 0
    assert before + 1 <= len(scored) <= before + 2, "both may be the same tensor"
    assert "L0 fc1 forward input" in scored[before:]
    alone()
    assert same()


def test_a_file_that_cannot_be_used_is_named_by_the_last_job(
    submit: Submit, job: RunJob, capsys: Captured
) -> None:
    file = Path("run/tensors/bf16/0_fc1_input.pt")
    file.write_bytes(file.read_bytes()[:1000])
    submit()
    capsys.readouterr()
    assert [job("make", task) for task in range(4)] == [0] * 4
    words = "2 of 8 tensors are scored, 1 of them cannot be used: the last job names them\n"
    assert words in capsys.readouterr().err
    assert job("join") == 1
    error = capsys.readouterr().err
    assert f"{file} is refused: it is no file of captured values" in error
    assert error.endswith("quantexp: 1 files could not be used, they are named above\n")
    assert main(["requantise", "run", *FEW, "--out", "alone"]) == 1
    assert same()


def test_tensors_that_are_captured_after_the_submission_end_the_jobs(
    submit: Submit, job: RunJob, capsys: Captured
) -> None:
    submit()
    manifest = Path("run/tensors/manifest.jsonl")
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[1:]))
    assert job("make", 0) == 1
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(
            f"the input of {Path.cwd()}/own has changed since the submission: run the same quantexp requantise again"
        )
    )


def test_no_other_request_begins_where_jobs_requantise(cluster: Cluster, submit: Submit) -> None:
    submit()
    (name,) = cluster.names()
    cluster.slurm.answer("squeue", queue_line("7_0", "RUNNING", nodes="n1", name=name))
    assert submit()[:2] == ["not sent these jobs requantise it already", "job 7_0 running on n1"]
    assert submit("--sqnr", "20", code=1) == [
        f"quantexp: {Path.cwd()}/own.partial: job 7_0 is running on n1 and requantises there; wait for it, cancel it "
        f"(submission {name}), or give another --out"
    ]


def test_json_has_the_jobs(cluster: Cluster, capsys: Captured) -> None:
    assert main([*cluster.words, "launcher=slurm", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["result"] == str(Path.cwd() / "own")
    assert [job["id"] for job in record["jobs"]] == ["7_0", "7_1", "7_2", "7_3", "8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "launcher=slurm", "layer=9"], "run/tensors layer=9: no captured tensor fits; "),
        (["nothing", "launcher=slurm"], "there is no run, sweep or folder "),
        (
            ["run", "launcher.max_parallel=2"],
            "launcher.max_parallel is for the jobs of a cluster: add launcher=slurm; on this machine --jobs is the "
            "number of processes",
        ),
        (["run", "--config-dir", "."], "--config-dir is for the jobs of a cluster: add launcher="),
        (
            ["run", "launcher=slurm", "launcher.num_processes=2"],
            "launcher.num_processes must be 1 for quantexp requantise, got 2; launcher.cpus_per_process is the number "
            "of processes that work in each task",
        ),
        (["run", "launcher=slurm", "launcher.colour=red"], "launcher.colour"),
        (["run", "launcher=slurm", "--formats", "fp3"], "--formats must be among "),
    ],
)
def test_a_request_that_does_not_fit_is_one_line_and_nothing_is_written(
    cluster: Cluster, capsys: Captured, words: list[str], message: str
) -> None:
    assert main(["requantise", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quantexp: ")
    assert message in line
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["bin", "run"]
