"""A draw divided among jobs: what is sent, that the result is that of one process, and what is done again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from quantexp.analysis.draw.work import Done, Task, do
from quantexp.analysis.quick.first_look import Look, _look
from quantexp.capture.reader import CapturedTensor
from quantexp.cli.main import main
from tests.analysis.draw.conftest import MX8, Unhashed, linear_formats, normal
from tests.launchers.slurm.conftest import FakeSlurm, queue_line

from .conftest import Cluster

Captured = pytest.CaptureFixture[str]
Submit = Callable[..., list[str]]
RunJob = Callable[..., int]


@pytest.fixture
def cluster(in_tmp: Path, clients: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A run of three tensors, one of them zeros, and a run of three others; two tensors are a task."""
    for number, scheme in enumerate(("bf16", "mxfp8")):
        capture = Unhashed(in_tmp / "runs" / f"tiny_wikipedia_{scheme}-{number}a2b3c4d")
        formats = linear_formats(MX8) if number else {}
        capture.add(normal(32, 32, seed=number), "input", formats=formats)
        capture.add(normal(32, 32, seed=9), "weight", formats=formats)
        grad = torch.zeros(32, 32).bfloat16() if number else normal(32, 32, seed=5)
        capture.add(grad, "grad_output", formats=formats)
        (capture.run_dir / "config.yaml").write_text(f"quant: {{name: {scheme}}}\n")
        capture.add_metrics([3.5, 3.4])
    monkeypatch.setattr("quantexp.processes.groups.MIN_PIECES", 2)
    return Cluster(clients, ["draw", "runs", "out=own", "--formats", "png", "--jobs", "1"])


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that are drawn from now on."""
    calls: list[str] = []

    def do_and_note(task: Task) -> Done:
        calls.append(f"{task.source} {task.entry.label}")
        return do(task)

    monkeypatch.setattr("quantexp.analysis.draw.tensors.do", do_and_note)
    return calls


def content(out: str) -> dict[str, str]:
    """The digest of each file of an output folder; of a picture that of its pixels."""
    digests = {}
    for path in sorted(Path(out).rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            data = Image.open(path).tobytes() if path.suffix == ".png" else path.read_bytes()
            digests[str(path.relative_to(out))] = hashlib.sha256(data).hexdigest()
    return digests


def alone(*words: str, code: int = 0) -> dict[str, str]:
    """What the command writes on this machine."""
    command = ["draw", "runs", "out=alone", "--formats", "png", "--jobs", "1", *words]
    assert main(command) == code
    return content("alone")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tasks_and_join_draw_what_one_process_draws(
    cluster: Cluster, submit: Submit, job: RunJob, looked: list[str], capsys: Captured
) -> None:
    output = submit("launcher.max_parallel=2")
    (name,) = cluster.names()
    assert name.startswith("draw-")
    assert output[:3] == [
        "submitted 3 tasks as the array 7, for 6 tensors, at most 2 at a time",
        "submitted job 8, which joins their outputs after the last of them",
        "result own",
    ]
    ends = []
    for task in (1, 0, 2):
        assert job("make", task) == 0
        ends.append(capsys.readouterr().err.splitlines()[-1])
    assert sorted(ends) == [f"{number} of 6 tensors are drawn" for number in (1, 1, 4)], (
        "the first tensor of a run comes with its quick analysis, which reads them all"
    )
    assert len(looked) == len(set(looked)) == 6
    assert job("join") == 0
    assert len(looked) == 6, "the last job draws no tensor again"
    assert "6 tensors (6 were drawn before), " in capsys.readouterr().out
    assert not Path("own.partial").exists()
    assert content("own") == alone()
    names = content("own")
    assert {"numerics/numerics.json", "statistics/statistics.csv", "tensor_stats.txt"} <= set(names)
    assert any(name.startswith("comparisons/difference_") for name in names)
    assert submit()[0] == "submitted job 9", "all is drawn: one job says so"
    assert job("join") == 0


def test_a_killed_task_goes_on_where_it_was(
    submit: Submit, job: RunJob, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    submit("--only", "heatmaps,numerics")
    drawn: list[str] = []

    def killed(task: Task) -> Done:
        if drawn:
            raise KeyboardInterrupt
        drawn.append(f"{task.source} {task.entry.name}")
        return do(task)

    with monkeypatch.context() as patched:
        patched.setattr("quantexp.analysis.draw.tensors.do", killed)
        with pytest.raises(KeyboardInterrupt):
            job("make", 0)
    again: list[str] = []

    def noted(task: Task) -> Done:
        again.append(f"{task.source} {task.entry.name}")
        return do(task)

    def no_measuring(entry: object) -> object:
        raise AssertionError("it is measured again")

    monkeypatch.setattr("quantexp.analysis.draw.tensors.do", noted)
    monkeypatch.setattr("quantexp.analysis.numerics.measured.statistics", no_measuring)
    assert job("make", 0) == 0
    assert len(again) == 1
    assert again != drawn
    capsys.readouterr()
    assert job("make", 0) == 0
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "resuming: 2 of 2 tensors are drawn",
        "2 of 6 tensors are drawn",
    ]
    assert len(again) == 1


@pytest.mark.slow
def test_measures_come_back_as_they_were_and_are_taken_once(
    submit: Submit, job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With zeros, whose measures are not numbers."""
    submit("--only", "numerics,comparisons")
    for task in range(3):
        assert job("make", task) == 0

    def no_values(entry: object) -> object:
        raise AssertionError("its values are read again")

    with monkeypatch.context() as patched:
        patched.setattr("quantexp.analysis.numerics.measured.statistics", no_values)
        patched.setattr("quantexp.analysis.numerics.drift.drift", no_values)
        assert job("join") == 0
    assert content("own") == alone("--only", "numerics,comparisons")


def test_force_draws_again_once_and_a_second_submission_goes_on(
    cluster: Cluster,
    submit: Submit,
    job: RunJob,
    looked: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = ["--only", "statistics,quick_analysis"]
    alone(*parts)
    assert main([*cluster.words, *parts]) == 0
    looked.clear()
    counted: list[str] = []

    def look_and_note(is_declared: bool, entry: CapturedTensor) -> Look | str:
        counted.append(f"{entry.folder} {entry.name}")
        return _look(is_declared, entry)

    monkeypatch.setattr("quantexp.analysis.quick.first_look._look", look_and_note)
    submit(*parts, "--force")
    assert job("make", 0) == 0
    again = submit(*parts, "--force")[0]
    assert again.startswith("submitted 2 tasks as the array 9, for ")
    assert again.endswith(" of 6 tensors")
    for task in (0, 1):
        assert job("make", task) == 0
    assert job("join") == 0
    assert len(looked) == len(set(looked)) == 6
    assert len(counted) == len(set(counted)) == 6
    assert content("own") == content("alone")


def test_a_file_that_cannot_be_used_is_named_by_the_last_job(
    submit: Submit, job: RunJob, capsys: Captured
) -> None:
    file = next(Path("runs").glob("*bf16*/tensors/*/*_input.pt"))
    file.write_bytes(b"damaged")
    submit("--only", "statistics")
    capsys.readouterr()
    assert [job("make", task) for task in range(3)] == [0] * 3
    words = "2 of 6 tensors are drawn, 1 of them cannot be used: the last job names them\n"
    assert words in capsys.readouterr().err
    assert job("join") == 1
    error = capsys.readouterr().err
    assert str(file) in error
    assert error.endswith("quantexp: 1 file could not be used, it is named above\n")
    assert content("own") == alone("--only", "statistics", code=1)


def test_no_other_draw_begins_where_jobs_draw(cluster: Cluster, submit: Submit) -> None:
    submit("--only", "statistics")
    (name,) = cluster.names()
    cluster.slurm.answer("squeue", queue_line("7_0", "RUNNING", nodes="n1", name=name))
    assert submit("--only", "statistics")[0] == "not sent these jobs draw it already"
    assert submit("layer=0", code=1) == [
        f"quantexp: {Path.cwd()}/own.partial: job 7_0 is running on n1 and draws there; wait for it, cancel it "
        f"(submission {name}), or give another out="
    ]


def test_the_default_output_folder_is_that_of_the_command_on_this_machine(
    cluster: Cluster, submit: Submit
) -> None:
    run = next(Path("runs").glob("*bf16*"))
    cluster.words[1:] = [str(run), "--only", "statistics"]
    assert submit()[:2] == ["submitted job 7", f"result {run}/figures"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing", "launcher=slurm"], "there is no run, sweep or folder "),
        (["runs", "launcher=slurm", "layer=9"], "no layer '9'; there are: 0"),
        (["runs", "launcher=slurm", "--only", "x"], "--only must be of "),
        (["runs", "launcher.time_min=2"], "launcher.time_min=2 is for SLURM and has no effect "),
        (
            ["runs", "launcher=slurm", "launcher.num_processes=2"],
            "launcher.num_processes must be 1 for quantexp draw, got 2; ",
        ),
    ],
)
def test_a_request_that_does_not_fit_is_one_line_and_nothing_is_written(
    cluster: Cluster, capsys: Captured, words: list[str], message: str
) -> None:
    assert main(["draw", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quantexp: ")
    assert message in line
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["bin", "runs"]
