"""Raw text is prepared by tasks of a real SLURM: the bytes of one process, whatever happens to a task on the way."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from quantexp.cli.main import main
from tests.data.prepare.made import content_of, dump, lines, rows, texts

from .cluster import Cluster
from .launched import start_again, until

Captured = pytest.CaptureFixture[str]
REQUEST = ["launcher=slurm", "launcher.cpus_per_process=1", "launcher.time_min=30"]


@pytest.fixture
def words(in_tmp: Path) -> list[str]:
    """A preparation of three files; the first has two shards, each of which takes about a second."""
    (in_tmp / "raw").mkdir()
    (in_tmp / "raw" / "a.xml").write_bytes(dump(texts(14_000)))
    (in_tmp / "raw" / "b.jsonl").write_bytes(lines(rows(texts(200, seed=1))))
    (in_tmp / "raw" / "c.jsonl").write_bytes(lines(rows(texts(300, seed=2))) + b"no JSON\n")
    return ["prepare", "dataset=dolma", "dataset.source=raw", "dataset.tokenizer=byte"]


def submitted(words: list[str], capsys: Captured, *more: str) -> tuple[str, list[str]]:
    """The submission's name and the ids of its jobs: of the array, if there is one, and of the last job."""
    assert main([*words, *REQUEST, *more]) == 0
    output = capsys.readouterr().out.splitlines()
    rows = [line for line in output if line.startswith("submitted")]
    name = next(line.rpartition("=")[2] for line in output if line.startswith("stop"))
    return name, [
        row.partition("array " if "array" in row else "job ")[2].split(",")[0] for row in rows
    ]


def started(name: str) -> psutil.Process:
    """The process of the first task, once the first of its two outputs exists."""
    until("an output", lambda: outputs(), 60)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words, environment = process.cmdline(), process.environ()
            is_task = name in " ".join(words) and "SLURM_PROCID" in environment
            if is_task and "python" in words[0] and environment["SLURM_ARRAY_TASK_ID"] == "0":
                return process
    raise AssertionError("the first task has ended")


def outputs() -> list[Path]:
    return sorted(Path("data").glob("dolma.partial/*/00000-*.npz"))


def no_jobs(cluster: Cluster, name: str) -> bool:
    return not cluster.squeue(f"--name={name}")


def expected(words: list[str]) -> dict[str, bytes]:
    """The files that one process of this machine writes."""
    assert main([*words, "dataset.path=alone/dolma", "dataset.prepare.num_workers=1"]) == 0
    return content_of(Path("alone/dolma"))


@pytest.mark.slow
def test_killed_task_goes_on_when_the_same_command_is_repeated(
    plain: Cluster, words: list[str], capsys: Captured
) -> None:
    name, ids = submitted(words, capsys)
    assert len(ids) == 2
    os.kill(started(name).pid, signal.SIGKILL)
    first = outputs()[0]
    written = first.stat().st_mtime_ns
    until("the end of all jobs", lambda: no_jobs(plain, name), 60)
    assert plain.states(ids[0])[f"{ids[0]}_0"] == "FAILED"
    assert plain.states(ids[1]) == {ids[1]: "CANCELLED"}, "its dependency cannot be satisfied"
    assert not Path("data/dolma.bin").exists()
    again, ids = submitted(words, capsys)
    assert len(ids) == 1, "one input is left"
    assert Path(f"runs/submissions/{name}").is_dir()
    held = os.open(first, os.O_RDONLY)  # the last job removes its name
    plain.wait_state(ids[0], "COMPLETED", 90)
    assert os.fstat(held).st_mtime_ns == written, "it was not made again"
    os.close(held)
    assert content_of(Path("data/dolma")) == expected(words)
    assert not Path("data/dolma.partial").exists()
    assert "data  " in Path(f"runs/submissions/{again}/{ids[0]}_0_log.out").read_text()


@pytest.mark.slow
def test_requeued_task_goes_on_by_itself_and_the_last_job_waits_for_it(
    plain: Cluster, words: list[str], capsys: Captured
) -> None:
    name, (array, last) = submitted(words, capsys)
    started(name)
    plain.scontrol("requeue", f"{array}_0")
    assert main([*words, *REQUEST]) == 0
    answer = capsys.readouterr().out
    assert "these jobs prepare it already" in answer
    assert f"job {last}" in answer
    assert f"scancel --name={name}" in answer
    assert main([*words]) == 1, "nor does this machine prepare there"
    assert "prepares there; wait for it" in capsys.readouterr().err
    start_again(plain, f"{array}_0")
    plain.wait_state(last, "COMPLETED", 120)
    log = Path(f"runs/submissions/{name}/{array}_0_0_log.err").read_text()
    assert "resuming: " in log
    assert content_of(Path("data/dolma")) == expected(words)


def test_request_that_slurm_refuses_leaves_nothing(
    plain: Cluster, words: list[str], capsys: Captured
) -> None:
    assert main([*words, *REQUEST, "launcher.partition=nope"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("quantexp: SLURM refuses the job: invalid partition specified: nope")
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["raw"]


@pytest.mark.slow
def test_one_file_is_one_job_of_several_processes(
    plain: Cluster, words: list[str], capsys: Captured
) -> None:
    words = [*words, "dataset.source=raw/a.xml"]
    _, (job,) = submitted(words, capsys, "launcher.cpus_per_process=2")
    plain.wait_state(job, "COMPLETED", 90)
    assert content_of(Path("data/dolma")) == expected(words)
