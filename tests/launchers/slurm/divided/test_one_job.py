"""`draw` and `requantise` as one job: what is sent, refused and not sent twice, and that the job is the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.cli.jobs import _run_in_job
from quantexp.cli.main import main
from tests.extras.requantise.conftest import linear, write_capture
from tests.launchers.slurm.conftest import FakeSlurm, options, queue_line

from .conftest import Cluster, Ended

Captured = pytest.CaptureFixture[str]
Submit = Callable[..., list[str]]
RunJob = Callable[..., Ended]
WORDS = {
    "draw": ["draw", "run", "layer=0", "--only", "statistics,heatmaps"],
    "requantise": ["requantise", "run", "layer=0", "--formats", "mxfp4", "--elements", "1024"],
}
AGAIN = {"draw": "it makes only what is missing", "requantise": "it starts from the beginning"}
DOES = {"draw": "draws", "requantise": "requantises"}
ELSEWHERE = {"draw": "out=", "requantise": "--out"}


@pytest.fixture(params=["draw", "requantise"])
def verb(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(in_tmp: Path, clients: FakeSlurm, verb: str) -> Cluster:
    """Two layers of operands."""
    write_capture(in_tmp / "run" / "tensors", {**linear(0), **linear(1)})
    return Cluster(clients, [*WORDS[verb], "--out", "own"])


def files(out: str) -> dict[str, bytes]:
    """The content of each file of an output folder, but of pictures and caches, which differ by their times."""
    return {
        str(path.relative_to(out)): b"" if path.suffix in (".png", ".svg") else path.read_bytes()
        for path in sorted(Path(out).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def test_one_job_is_sent(cluster: Cluster, submit: Submit, verb: str) -> None:
    output = submit("launcher.partition=lo", "launcher.max_parallel=2")
    (name,) = cluster.names()
    assert name.startswith(f"{verb}-")
    assert output == [
        "submitted job 7",
        "result own",
        f"logs runs/submissions/{name}",
        f"follow squeue --name={name}",
        f"tail -n 1 runs/submissions/{name}/*.err",
        f"stop scancel --name={name}",
        f"resume the same command: {AGAIN[verb]}",
    ]
    (script,) = cluster.sent()
    assert "array" not in options(script)
    assert not Path("own").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_job_runs_the_command_itself(submit: Submit, job: RunJob, verb: str) -> None:
    submit()
    ended = job()
    assert ended.returncode == 0, ended.stderr
    assert not Path("own.partial").exists()
    assert main([*WORDS[verb], "--out", "alone"]) == 0
    expected = files("alone")
    assert expected
    assert files("own") == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_file_that_cannot_be_used_is_named_by_the_job(submit: Submit, job: RunJob) -> None:
    file = Path("run/tensors/bf16/0_fc1_input.pt")
    file.write_bytes(file.read_bytes()[:1000])
    submit()
    ended = job()
    assert ended.returncode == 1
    assert str(file) in ended.stderr
    assert "could not be used, " in ended.stderr
    assert not Path("own.partial").exists()


def test_the_record_of_a_job_that_is_interrupted_stays(
    submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit()
    monkeypatch.setattr("quantexp.cli.main.main", lambda words: 130)
    assert _run_in_job("own.partial", []) == 130
    assert Path("own.partial/submission.json").exists()
    monkeypatch.setattr("quantexp.cli.main.main", lambda words: 1)
    assert _run_in_job("own.partial", []) == 1
    assert not Path("own.partial").exists()


def test_the_same_command_shows_its_live_job_and_another_is_refused(
    cluster: Cluster, submit: Submit, verb: str
) -> None:
    submit()
    (name,) = cluster.names()
    cluster.slurm.answer("squeue", queue_line("7", "RUNNING", nodes="n1", name=name))
    assert submit()[:2] == [f"not sent these jobs {verb} it already", "job 7 running on n1"]
    assert submit("--jobs", "3", code=1) == [
        f"quantexp: {Path.cwd()}/own.partial: job 7 is running on n1 and {DOES[verb]} there; wait for it, cancel it "
        f"(submission {name}), or give another {ELSEWHERE[verb]}"
    ]
    assert len(cluster.sent()) == 1


def test_the_same_command_names_the_output_of_a_job_that_was_killed(
    cluster: Cluster, submit: Submit
) -> None:
    submit()
    (name,) = cluster.names()
    (Path("runs/submissions") / name / "7_0_log.err").touch()
    assert submit()[3:5] == [
        f"runs/submissions/{name} (the jobs before)",
        f"runs/submissions/{name}/7_0_log.err (did not finish)",
    ]


@pytest.mark.parametrize("verb", ["requantise"], indirect=True)
def test_json_has_the_job(cluster: Cluster, capsys: Captured) -> None:
    assert main([*cluster.words, "launcher=slurm", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["result"] == str(Path.cwd() / "own")
    assert [job["id"] for job in record["jobs"]] == ["7"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("verb", ["requantise"], indirect=True)
def test_a_format_of_the_user_goes_with_the_job(
    cluster: Cluster, submit: Submit, job: RunJob
) -> None:
    Path("mine/format").mkdir(parents=True)
    Path("mine/format/coarse.yaml").write_text("element: e3m3\nblock: 24\nscale: ue5m3\n")
    cluster.words[3:5] = ["--formats", "coarse", "--config-dir", "mine"]
    submit()
    assert job().returncode == 0
    assert "coarse" in Path("own/requantise.csv").read_text()


def test_the_default_output_folder_is_that_of_the_command_on_this_machine(
    cluster: Cluster, submit: Submit, verb: str
) -> None:
    cluster.words[:] = WORDS[verb]
    folder = {"draw": "run/figures", "requantise": "run/requantise"}[verb]
    assert submit()[:2] == ["submitted job 7", f"result {folder}"]


REFUSED = [
    (["nothing", "launcher=slurm"], "there is no run, sweep or folder "),
    (
        ["run", "launcher.max_parallel=2"],
        "launcher.max_parallel is for the jobs of a cluster: add launcher=slurm; on this machine --jobs is the number "
        "of processes",
    ),
    (["run", "--config-dir", "."], "--config-dir is for the jobs of a cluster: add launcher="),
    (
        ["run", "launcher=slurm", "launcher.num_processes=2"],
        "launcher.num_processes must be 1 for quantexp {verb}, got 2; launcher.cpus_per_process is the number of "
        "processes that work in each task",
    ),
    (["run", "launcher=slurm", "launcher.colour=red"], "launcher.colour"),
]


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        *((verb, words, message) for verb in WORDS for words, message in REFUSED),
        ("draw", ["run", "launcher=slurm", "layer=9"], "no layer '9'; there are: 0, 1"),
        ("draw", ["run", "launcher=slurm", "--only", "x"], "--only must be of "),
        ("requantise", ["run", "launcher=slurm", "layer=9"], "no captured tensor fits; "),
        ("requantise", ["run", "launcher=slurm", "--formats", "fp3"], "--formats must be among "),
    ],
    indirect=["verb"],
)
def test_a_request_that_does_not_fit_is_one_line_and_nothing_is_written(
    cluster: Cluster, capsys: Captured, verb: str, words: list[str], message: str
) -> None:
    assert main([verb, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quantexp: ")
    assert message.format(verb=verb) in line
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["bin", "run"]
