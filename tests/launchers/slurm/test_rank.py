"""One rank of a job: which run it trains, and how it meets the other ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quantexp_launchers.slurm.job import main
from quantexp_launchers.slurm.rank import end_child, rendezvous_port, run_in_child

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


def unwatched(child: int) -> Callable[[], None]:
    return lambda: None


def test_exit_code_and_signal_of_the_child_are_returned() -> None:
    assert run_in_child(lambda: 7, unwatched) == 7

    def dies() -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert run_in_child(dies, unwatched) == -signal.SIGKILL


def test_error_of_the_child_is_printed_and_exit_code_1(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise ValueError("no such thing")

    assert run_in_child(fails, unwatched) == 1
    assert "ValueError: no such thing" in capfd.readouterr().err


def test_watch_may_end_a_stopped_child() -> None:
    def stops() -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    def look(child: int) -> Callable[[], None]:
        def once() -> None:
            end_child(child, 20.0)
            raise TimeoutError(str(child))

        return once

    with pytest.raises(TimeoutError):
        run_in_child(stops, look)


def test_handler_of_the_parent_that_raises_ends_the_child_alone() -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    def look(child: int) -> Callable[[], None]:
        os.kill(child, signal.SIGTERM)  # the child may not have started yet
        return lambda: None

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        for _ in range(20):
            assert run_in_child(lambda: time.sleep(60) or 0, look) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from quantexp_launchers.slurm.rank import end_like, run_in_child
def work():
    if sys.argv[2] == "handles":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(42))
    Path(sys.argv[1]).with_suffix(".part").write_text(str(os.getpid()))
    Path(sys.argv[1]).with_suffix(".part").rename(sys.argv[1])
    while True:
        time.sleep(0.1)  # a signal just before a sleep is handled after it
sys.exit(end_like(run_in_child(work, lambda child: lambda: None)))
"""


@pytest.mark.parametrize(
    ("how", "to_child", "number", "code"),
    [
        ("handles", False, signal.SIGTERM, 42),
        ("dies", True, signal.SIGKILL, -signal.SIGKILL),
        ("dies", True, signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_signals_reach_the_child_and_the_parent_ends_as_it_does(
    tmp_path: Path, how: str, to_child: bool, number: int, code: int
) -> None:
    file = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(file), how]) as process:
        while not file.exists():
            assert process.poll() is None
        os.kill(int(file.read_text()) if to_child else process.pid, number)
        assert process.wait(120) == code


def test_child_ends_with_its_parent(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file), "dies"], stdout=subprocess.PIPE
    ) as process:
        while not file.exists():
            assert process.poll() is None
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == b"", "the child's copy is closed: it has ended"
