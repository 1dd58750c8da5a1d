"""One rank of a job: which run it trains, and how it meets the other ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quantexp_launchers.slurm.job import main
from quantexp_launchers.slurm.rank import rendezvous_port

from quantexp.config.load import save
from quantexp.runs.paths import RunDir, Submission
from quantexp.runs.status import read_json, write_json
from quantexp.schema import Experiment

#: What srun sets for the last of four ranks on two nodes.
OF_SRUN = {
    "SUBMITIT_EXECUTOR": "slurm",
    "SLURM_JOB_ID": "12",
    "SLURM_ARRAY_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "n[8-9]",
}
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submission]:
    """A submission of two runs, in the environment of one of its ranks."""
    folder = Submission(tmp_path)
    content = {"runs": ["/r/one", "/r/two"], "snapshot": "/r/snapshots/0a", "umask": 0o027}
    write_json(folder.tasks, content)
    for name in OF_TORCHRUN:
        monkeypatch.setenv(name, "")
    for name, value in OF_SRUN.items():
        monkeypatch.setenv(name, value)
    umask, handler = os.umask(0o077), signal.getsignal(signal.SIGUSR2)
    yield folder
    os.umask(umask)
    signal.signal(signal.SIGUSR2, handler)


def test_task_runs_the_worker_of_its_run_with_torchrun_s_variables(
    submission: Submission, monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Experiment]
) -> None:
    run = RunDir(submission.root / "two")
    run.root.mkdir()
    save(tiny(), run.config)
    write_json(submission.tasks, {**read_json(submission.tasks), "runs": ["/r/one", str(run.root)]})

    def worker(words: list[str]) -> int:
        variables = {name: os.environ[name] for name in OF_TORCHRUN}
        handler = signal.getsignal(signal.SIGUSR2)
        write_json(run.status, [words, variables, os.umask(0o077), handler is signal.SIG_IGN])
        return 130

    monkeypatch.setattr("quantexp.training.worker.main", worker)
    assert main(["rank", str(submission.root)]) == 130
    words, variables, umask, ignores_warning = read_json(run.status)
    assert words == [str(run.root), "--in-job"]
    assert variables == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "n8",
        "MASTER_PORT": str(rendezvous_port(12)),
    }
    assert umask == 0o027, "the submitter's"
    assert ignores_warning, "until the worker can take it"


def test_task_that_the_submission_does_not_list_is_refused(
    submission: Submission, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert main(["rank", str(submission.root)]) == 1
    errors = capsys.readouterr().err
    assert errors.endswith(
        f" ERROR job rank: {submission.tasks} lists 2 runs, and this is task 2\n"
    )


def test_ports_are_below_the_systems_own_range() -> None:
    ports = {rendezvous_port(job) for job in range(100_000)}
    assert min(ports) == 20000
    assert max(ports) < 32768
    assert rendezvous_port(5) != rendezvous_port(6)


def test_importing_the_job_module_imports_neither_hydra_nor_torch() -> None:
    program = (
        "import sys, quantexp_launchers.slurm.job\n"
        "sys.exit(bool({'hydra', 'torch', 'submitit'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
