"""One rank of a job: which run it is for, and how it finds the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quantexp_launchers.slurm.task import main, rendezvous_port

from quantexp.errors import RunError
from quantexp.runs.paths import Submission
from quantexp.runs.status import write_json

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


def test_task_becomes_the_worker_of_its_run_with_torchrun_s_variables(
    submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def worker(words: list[str]) -> int:
        calls.append(words)
        assert {name: os.environ[name] for name in OF_TORCHRUN} == {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "n8",
            "MASTER_PORT": str(rendezvous_port(12)),
        }
        current = os.umask(0o077)
        assert current == 0o027, "the submitter's"
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN, "until the worker can take it"
        return 130

    monkeypatch.setattr("quantexp.training.worker.main", worker)
    assert main([str(submission.root)]) == 130
    assert calls == [["/r/two", "--in-job"]]


def test_task_that_the_submission_does_not_list_is_refused(
    submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    with pytest.raises(RunError, match=r"tasks\.json lists 2 runs, and this is task 2"):
        main([str(submission.root)])


def test_ports_are_below_those_that_systems_give_out() -> None:
    ports = {rendezvous_port(job) for job in range(100_000)}
    assert min(ports) == 20000
    assert max(ports) < 32768
    assert rendezvous_port(5) != rendezvous_port(6)


def test_importing_what_a_task_needs_imports_neither_hydra_nor_torch() -> None:
    program = (
        "import sys, quantexp_launchers.slurm.task\n"
        "sys.exit(bool({'hydra', 'torch', 'submitit'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
