"""The log of a rank, whole and as it grows."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quantexp.errors import RunError
from quantexp.launch.ledger import logs
from quantexp.launch.ledger.logs import follow_log, show_log
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.runs.status import State, Status, read_status, write_status
from tests.launchers.slurm.conftest import SUBMISSION, FakeSlurm, MakeRun, queue_line


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.02)
    monkeypatch.setattr(logs, "QUERY_S", 0.1)


def log_of(run: RunDir, rank: int = 0) -> str:
    parts: list[str] = []
    show_log(run, rank, parts.append)
    return "".join(parts)


def of_job(run: RunDir) -> Path:
    folder = RunsRoot(run.root.parent).submissions / SUBMISSION
    folder.mkdir(parents=True)
    return folder


class Following:
    """`follow_log` in a thread of its own."""

    def __init__(self, run: RunDir) -> None:
        self.parts: list[str] = []
        self.thread = threading.Thread(target=follow_log, args=(run, 0, self.parts.append))
        self.thread.start()

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def until(self, text: str) -> None:
        end = time.monotonic() + 240
        while self.text != text:
            assert time.monotonic() < end, self.text
            time.sleep(0.01)

    def ends(self) -> None:
        self.thread.join(240)
        assert not self.thread.is_alive()


@pytest.fixture
def running(make_run: MakeRun) -> Iterator[RunDir]:
    """A run of this machine whose lock is held."""
    run = make_run(host=platform.node(), pid=os.getpid())
    lock = take_lock(run)
    yield run
    os.close(lock)


def end(run: RunDir, state: State = State.COMPLETED) -> None:
    status = read_status(run.status)
    assert status is not None
    status.state = state
    write_status(run.status, status)


def test_log_of_each_rank_is_shown_whole(make_run: MakeRun) -> None:
    run = make_run(state=State.COMPLETED)
    run.config.write_text("launcher:\n  num_processes: 2\n")
    run.rank_log(0).write_text("one\ntwo\n")
    run.rank_log(1).write_bytes(b"caf\xc3\xa9 \xff\n")
    assert log_of(run) == "one\ntwo\n"
    assert log_of(run, 1) == "café \ufffd\n"


@pytest.mark.parametrize(
    ("processes", "rank", "ranks"),
    [(1, 1, "rank 0 alone"), (4, 4, "ranks 0 to 3"), (4, -1, "ranks")],
)
def test_rank_that_a_run_does_not_have_is_refused_with_the_ranks_it_has(
    make_run: MakeRun, processes: int, rank: int, ranks: str
) -> None:
    run = make_run()
    run.config.write_text(f"launcher:\n  num_processes: {processes}\n")
    for log in (show_log, follow_log):
        with pytest.raises(
            RunError,
            match=f"--rank must be one of m_d_bf16-00000001, which has {ranks}.*, got {rank}",
        ):
            log(run, rank, print)


def test_output_of_the_job_replaces_a_missing_log(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", queue_line("7_4", "RUNNING"))
    run = make_run(submission=SUBMISSION, task=4, job_id="7_4")
    folder = of_job(run)
    out, err = folder / "7_4_0_log.out", folder / "7_4_0_log.err"
    out.write_text("modules\n")
    err.write_text("warning\n")
    assert log_of(run) == f"==> {out} <==\nmodules\n==> {err} <==\nwarning\n"
    run.rank_log(0).write_text("own\n")
    assert log_of(run) == "own\n"


def test_output_of_torchrun_replaces_a_missing_log(make_run: MakeRun) -> None:
    run = make_run(state=State.FAILED)
    run.torchrun_log.write_text("no rendezvous\n")
    assert log_of(run) == f"==> {run.torchrun_log} <==\nno rendezvous\n"


def test_run_without_output_is_described(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", queue_line("7_4", "PENDING", reason="Resources"))
    run = make_run(state=State.PENDING, submission=SUBMISSION, task=4, job_id="7_4")
    with pytest.raises(RunError) as caught:
        log_of(run)
    assert str(caught.value) == (
        "m_d_bf16-00000001 has printed nothing yet (job 7_4 waiting (Resources)); quantexp logs -f waits for it"
    )
    end(run, State.CANCELLED)
    for log in (show_log, follow_log):
        with pytest.raises(RunError, match=r"has printed nothing: it is cancelled$"):
            log(run, 0, print)


def test_folder_without_a_configuration_is_refused(make_run: MakeRun) -> None:
    run = make_run()
    run.config.write_text("[]")
    with pytest.raises(RunError, match=r"config\.yaml must hold keys with values, got list"):
        log_of(run)
    run.config.unlink()
    with pytest.raises(
        RunError, match=r"config\.yaml is not a run's configuration: it has no launcher\.n"
    ):
        log_of(run)


def test_following_ends_with_the_run(running: RunDir) -> None:
    log = running.rank_log(0)
    log.write_text("one\n")
    following = Following(running)
    following.until("one\n")
    with log.open("ab") as stream:
        stream.write(b"caf\xc3")
        stream.flush()
        following.until("one\ncaf")
        stream.write(b"\xa9\n")
    end(running)
    following.ends()
    assert following.text == "one\ncafé\n"


def test_following_waits_for_the_first_output(running: RunDir) -> None:
    following = Following(running)
    time.sleep(0.1)
    running.rank_log(0).write_text("at last\n")
    following.until("at last\n")
    end(running)
    following.ends()


def test_following_goes_on_across_a_requeue(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", queue_line("7_4", "RUNNING"))
    run = make_run(submission=SUBMISSION, task=4, job_id="7_4")
    run.rank_log(0).write_text("first start\n")
    following = Following(run)
    following.until("first start\n")
    end(run, State.PREEMPTED)
    slurm.answer("squeue", queue_line("7_4", "PENDING", restarts=1))
    time.sleep(0.3)
    earlier = run.attempts / "1"
    earlier.mkdir(parents=True)
    run.logs.rename(earlier / "logs")
    run.logs.mkdir()
    write_status(
        run.status,
        Status(State.RUNNING, launcher="slurm", submission=SUBMISSION, task=4, job_id="7_4"),
    )
    slurm.answer("squeue", queue_line("7_4", "RUNNING", restarts=1))
    run.rank_log(0).write_text("2nd\n")
    following.until("first start\n2nd\n")
    end(run)
    slurm.answer("squeue", queue_line("7_4", "COMPLETED", restarts=1))
    following.ends()


@pytest.mark.parametrize("log", [show_log, follow_log])
def test_output_that_nobody_reads_any_more_ends_the_command(
    running: RunDir, log: Callable[[RunDir, int, Callable[[str], object]], None]
) -> None:
    running.rank_log(0).write_text("one\n")

    def write(text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        log(running, 0, write)
