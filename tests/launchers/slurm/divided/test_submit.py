"""Submitting a preparation with stand-ins for SLURM's clients: what is sent, printed, refused and not sent twice."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.data.prepared import read_card
from tests.launchers.slurm.conftest import options, queue_line

from .conftest import Cluster, Ended

Submit = Callable[..., list[str]]
RunJob = Callable[..., Ended]
Captured = pytest.CaptureFixture[str]


def follows(name: str) -> list[str]:
    """The lines after the jobs."""
    return [
        "result data/dolma",
        f"logs runs/submissions/{name}",
        f"follow squeue --name={name}",
        f"tail -n 1 runs/submissions/{name}/*.err",
        f"stop scancel --name={name}",
        "resume the same command: it makes only what is missing",
    ]


def test_an_array_makes_the_outputs_and_a_job_after_it_joins_them(
    cluster: Cluster, submit: Submit
) -> None:
    output = submit(
        "launcher.max_parallel=2", "launcher.cpus_per_process=4", "launcher.partition=lo"
    )
    (name,) = cluster.names()
    assert output == [
        "submitted 3 tasks as the array 7, for 3 input files, at most 2 at a time",
        "submitted job 8, which joins their outputs after the last of them",
        *follows(name),
    ]
    array, join = cluster.sent()
    folder = Path.cwd() / "runs" / "submissions" / name
    common = {
        **{"cpus-per-task": "4", "job-name": name, "nodes": "1", "ntasks-per-node": "1"},
        **{"open-mode": "append", "partition": "lo", "requeue": "", "signal": "USR2@300"},
        "time": "60",
    }
    assert options(array) == {
        **common,
        "array": "0-2%2",
        "output": f"{folder}/%A_%a_0_log.out",
        "error": f"{folder}/%A_%a_0_log.err",
    }
    assert options(join) == {
        **common,
        "dependency": "afterok:7",
        "kill-on-invalid-dep": "yes",
        "output": f"{folder}/%j_0_log.out",
        "error": f"{folder}/%j_0_log.err",
    }
    for script in (array, join):
        assert f"-m quantexp_launchers.slurm.divided_job {folder}\n" in script
    assert (folder / "submission.sh").read_text() == array
    assert (folder / "join.sh").read_text() == join


def test_the_check_asks_for_what_is_sent(cluster: Cluster, submit: Submit) -> None:
    submit("launcher.max_parallel=2")
    checked, sent = options(cluster.checked()), options(cluster.sent()[0])
    differs = {"job-name", "output", "error"}
    assert checked.keys() == sent.keys()
    assert {name for name in sent if checked[name] != sent[name]} == differs


def test_files_of_a_submission_are_private_and_the_result_has_the_user_s_umask(
    cluster: Cluster, submit: Submit
) -> None:
    before = os.umask(0o027)
    try:
        submit("+launcher.environment.WORD=value")
    finally:
        os.umask(before)
    folder = Path("runs/submissions") / cluster.names()[0]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert cluster.plan()["umask"] == 0o027
    assert "WORD" not in (folder / "plan.json").read_text()
    assert "export WORD=value" in cluster.sent()[0]


def test_parts_share_the_tasks_that_the_cluster_allows(cluster: Cluster, submit: Submit) -> None:
    cluster.slurm.answer("scontrol", "MaxArraySize = 2\n")
    submit()
    assert cluster.plan()["groups"] == [[0, 2], [1]]
    assert options(cluster.sent()[0])["array"] == "0-1%2"


def test_one_file_is_one_job(cluster: Cluster, submit: Submit) -> None:
    output = submit("dataset.source=raw/0.jsonl", "launcher.max_parallel=5")
    assert output == ["submitted job 7", *follows(cluster.names()[0])]
    (script,) = cluster.sent()
    assert "array" not in options(script)
    assert "dependency" not in options(script)
    assert cluster.plan()["groups"] == []


def test_a_container_starts_both_scripts(cluster: Cluster, submit: Submit) -> None:
    submit(
        *("launcher.container=/images/a.sif", "launcher.python=python3"),
        *("launcher.container_mounts=[/data:/data]", "launcher.srun_args=['--mpi=none']"),
    )
    root = Path.cwd() / "runs"
    words = f"apptainer exec --bind {root}:{root} --bind /data:/data /images/a.sif python3 -u -m"
    for script in cluster.sent():
        assert f" --kill-on-bad-exit=1 --mpi=none {words} quantexp_launchers.slurm.divi" in script


def test_a_limit_that_does_not_bind_is_not_mentioned(submit: Submit) -> None:
    assert submit("launcher.max_parallel=3")[0] == (
        "submitted 3 tasks as the array 7, for 3 input files"
    )


def alive(cluster: Cluster, name: str) -> None:
    """Let squeue show a running task, a pending one, an ended one, and the last job."""
    cluster.slurm.answer(
        "squeue",
        queue_line("7_0", "RUNNING", nodes="n1", name=name)
        + queue_line("7_1", "COMPLETED", name=name)
        + queue_line("7_2", "PENDING", reason="JobArrayTaskLimit", name=name)
        + queue_line("8", "PENDING", reason="Dependency", name=name),
    )


def test_the_same_command_shows_its_live_jobs_and_submits_nothing(
    cluster: Cluster, submit: Submit, capsys: Captured
) -> None:
    submit()
    (name,) = cluster.names()
    alive(cluster, name)
    assert submit() == [
        "not sent these jobs prepare it already",
        "job 7_0 running on n1",
        "job 7_2 waiting (JobArrayTaskLimit)",
        "job 8 waiting (Dependency)",
        *follows(name),
    ]
    assert len(cluster.sent()) == 2
    assert ["squeue", "--noheader", "--array", "--all", "--states=all", f"--name={name}"] == (
        cluster.slurm.calls("squeue")[-1][:6]
    )
    assert main([*cluster.words, "launcher=slurm", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == {
        "prefix": str(Path.cwd() / "data" / "dolma"),
        "dataset": "dolma",
        "submitted": False,
        "jobs": [
            {"id": "7_0", "activity": "running on n1"},
            {"id": "7_2", "activity": "waiting (JobArrayTaskLimit)"},
            {"id": "8", "activity": "waiting (Dependency)"},
        ],
        "folder": str(Path.cwd() / "runs" / "submissions" / name),
        "follow": [f"squeue --name={name}", f"tail -n 1 runs/submissions/{name}/*.err"],
        "stop": f"scancel --name={name}",
    }


def test_json_of_a_submission_has_the_ids(cluster: Cluster, capsys: Captured) -> None:
    assert main([*cluster.words, "launcher=slurm", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["submitted"] is True
    assert [job["id"] for job in record["jobs"]] == ["7_0", "7_1", "7_2", "8"]
    assert {job["activity"] for job in record["jobs"]} == {"waiting"}


def test_only_a_few_of_many_jobs_are_listed(cluster: Cluster, submit: Submit) -> None:
    submit()
    (name,) = cluster.names()
    queue = "".join(queue_line(f"7_{n}", "PENDING", name=name) for n in range(40))
    cluster.slurm.answer("squeue", queue)
    output = submit()
    assert sum(line.startswith("job 7_") for line in output) == 12
    assert "and 28 more" in output


@pytest.mark.parametrize("launcher", ["slurm", "local"])
@pytest.mark.parametrize("words", [[], ["dataset.prepare.min_chars=9"]], ids=["same", "other"])
def test_no_other_preparation_begins_where_jobs_prepare(
    cluster: Cluster, submit: Submit, capsys: Captured, launcher: str, words: list[str]
) -> None:
    submit()
    (name,) = cluster.names()
    alive(cluster, name)
    same = launcher == "slurm" and not words
    assert main([*cluster.words, f"launcher={launcher}", *words]) == (not same)
    refusal = (
        f"quantexp: {Path.cwd()}/data/dolma.partial: job 7_0 is running on n1 and prepares there; wait for it, cancel "
        f"it (submission {name}), or give another dataset.path\n"
    )
    assert capsys.readouterr().err == ("" if same else refusal)
    assert not Path("data/dolma.bin").exists()


def test_this_machine_finishes_what_the_jobs_left(
    cluster: Cluster, submit: Submit, capsys: Captured
) -> None:
    submit()
    assert main(cluster.words) == 0
    card = read_card(Path("data/dolma"))
    assert card is not None
    assert sum(card.num_documents) == 60
    assert not Path("data/dolma.partial").exists()


def test_jobs_that_cannot_be_queried_are_not_taken_for_ended(
    cluster: Cluster, submit: Submit, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit()
    cluster.slurm.answer("squeue", err="no controller\n", code=1)
    assert submit(code=1)[0].startswith("quantexp: squeue failed (exit code 1): no controller;")
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(cluster.words) == 1
    file = Path.cwd() / "data" / "dolma.partial" / "submission.json"
    assert capsys.readouterr().err == (
        f"quantexp: {file} names jobs of launcher.kind=slurm, which cannot be queried (no SLURM here: squeue is not on "
        "PATH; go to a machine of the cluster, or add SLURM's folder to PATH); delete that file if none of them is "
        "left\n"
    )
    file.unlink()
    assert main(cluster.words) == 0


def test_after_a_failed_task_only_its_inputs_are_submitted(
    cluster: Cluster, submit: Submit, job: RunJob
) -> None:
    submit()
    (name,) = cluster.names()
    for task in range(3):
        (Path("runs/submissions") / name / f"7_{task}_0_log.err").touch()
    assert job(1).returncode == 0
    queue = queue_line("7_0", "FAILED", name=name)
    queue += queue_line("8", "PENDING", reason="DependencyNeverSatisfied", name=name)
    cluster.slurm.answer("squeue", queue)
    output = submit()
    assert output[:4] == [
        "submitted 2 tasks as the array 9, for 2 of 3 input files",
        "submitted job 10, which joins their outputs after the last of them",
        "result data/dolma",
        f"logs runs/submissions/{cluster.names()[1]}",
    ]
    assert output[4:7] == [
        f"runs/submissions/{name} (the jobs before)",
        f"runs/submissions/{name}/7_0_0_log.err (did not finish)",
        f"runs/submissions/{name}/7_2_0_log.err (did not finish)",
    ]
    assert cluster.plan()["groups"] == [[0], [2]]


def test_when_all_outputs_exist_one_job_joins_them(
    cluster: Cluster, submit: Submit, job: RunJob
) -> None:
    submit()
    (name,) = cluster.names()
    for task in range(3):
        assert job(task).returncode == 0
    for log in ("7_1_0_log.err", "8_0_log.err"):
        (Path("runs/submissions") / name / log).touch()
    output = submit()
    assert output[0] == "submitted job 9"
    assert output[4] == f"runs/submissions/{name}/8_0_log.err (did not finish)"


def test_a_dataset_that_exists_is_shown_and_not_submitted(cluster: Cluster, submit: Submit) -> None:
    assert main(cluster.words) == 0
    output = submit()
    assert "prepared before, from the same input in the same way:" in output
    assert output[-1].startswith("train quantexp dataset=dolma")
    message = submit("dataset.prepare.min_chars=9", code=1)
    assert message[0].endswith("give another dataset.path, or force=true to replace it")
    assert cluster.sent() == []
    assert submit("dataset.prepare.min_chars=9", "force=true")[0].startswith("submitted 3 tasks")
    assert cluster.plan("work.json")["force"] is True


def test_all_jobs_are_sent_or_none(cluster: Cluster, submit: Submit) -> None:
    cluster.refuse(8)
    message = submit(code=1)
    assert message[0].startswith(
        "quantexp: SLURM refuses the job: No more jobs; asked for launcher."
    )
    name = cluster.names()[-1]
    assert cluster.slurm.calls("scancel") == [["scancel", "--quiet", f"--name={name}"]]
    (cluster.slurm.folder / "refuse").unlink()
    assert submit()[0].startswith("submitted 3 tasks as the array 8")


def test_a_folder_that_another_process_prepares_in_is_refused(
    cluster: Cluster, submit: Submit
) -> None:
    Path("data/dolma.partial").mkdir(parents=True)
    with Path("data/dolma.partial/.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        message = submit(code=1)
    assert "another process prepares there; wait for it" in message[0]
    assert cluster.sent() == []


def test_a_damaged_record_of_a_submission_is_named(cluster: Cluster, submit: Submit) -> None:
    Path("data/dolma.partial").mkdir(parents=True)
    Path("data/dolma.partial/submission.json").write_text("{")
    message = submit(code=1)[0]
    assert message.startswith(
        f"quantexp: {Path.cwd()}/data/dolma.partial/submission.json, line 1: "
    )
    assert message.endswith("; delete it if no job prepares there")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["launcher.num_processes=2"],
            "launcher.num_processes must be 1 for quantexp prepare, got 2; launcher.cpus_per_process is the number of "
            "processes that work in each task",
        ),
        (["dry_run=true"], "dry_run is for runs; drop it, or leave the preparation out"),
        (
            ["paths.root='a:b'"],
            "paths.root must not hold ':', which divides the search path of Python, got '{here}/a:b'; choose another "
            "folder",
        ),
    ],
)
def test_a_request_that_does_not_fit_is_refused_before_anything_is_written(
    cluster: Cluster, submit: Submit, words: list[str], message: str
) -> None:
    assert submit(*words, code=1) == [f"quantexp: {message.format(here=Path.cwd())}"]
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["bin", "raw"]


def test_a_gpu_is_pointed_out(submit: Submit) -> None:
    assert submit("launcher.gpus_per_node=1")[0] == (
        "each task asks for a GPU, which quantexp prepare does not use: launcher.gpus_per_node=0"
    )


def test_without_slurm_nothing_is_written(
    cluster: Cluster, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit(code=1)[0].startswith("quantexp: there is no SLURM here (sbatch is not on PATH)")
    assert not Path("data").exists()


def test_a_folder_of_submissions_that_cannot_be_written_is_named(
    cluster: Cluster, submit: Submit
) -> None:
    Path("runs").mkdir()
    Path("runs/submissions").touch()
    message = submit(code=1)[0]
    assert message.startswith(f"quantexp: {Path.cwd()}/runs/submissions/prepare-")
    assert message.endswith(
        " cannot be written: File exists; set paths.root to a folder that can"
    ) or (
        message.endswith(" cannot be written: Not a directory; set paths.root to a folder that can")
    )
