"""The final state that a rank records, also after signals at any time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantexp.config.load import save
from quantexp.errors import RunError
from quantexp.runs.fencing import take_over
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import Rank, read_record
from quantexp.runs.status import Phase, State, read_status
from quantexp.schema import Experiment
from quantexp.training import worker
from quantexp.training.worker import Worker


@pytest.fixture
def second(tiny: Callable[..., Experiment], tmp_path: Path) -> Worker:
    """Rank 1 of two."""
    return Worker(RunDir(tmp_path), tiny(), Rank(1, 2, 1))


def test_rank_that_does_not_lead_writes_its_record_and_no_status(
    second: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second, "_train", lambda: None)
    assert second.run() == 0
    record = read_record(second.context.run, 1)
    assert record is not None
    assert (record.pid, record.state) == (os.getpid(), State.COMPLETED)
    assert read_status(second.context.run.status) is None


def test_signal_cancels_the_run(second: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second, "_train", lambda: second.interrupt(signal.SIGTERM, None))
    assert second.run() == 130
    record = read_record(second.context.run, 1)
    assert record is not None
    assert (record.state, record.reason) == (State.CANCELLED, "ended by SIGTERM")


def test_signal_while_an_error_is_recorded_does_not_hide_the_error(
    second: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    write = worker.write_record  # type: ignore[attr-defined]

    def interrupt_and_write(*arguments: object) -> None:
        if arguments[-1].state is State.FAILED:  # type: ignore[attr-defined]
            second.interrupt(signal.SIGTERM, None)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(second, "_train", fails)
    monkeypatch.setattr(worker, "write_record", interrupt_and_write)
    assert second.run() == 1
    record = read_record(second.context.run, 1)
    assert record is not None
    assert (record.state, record.lost_peer) == (State.FAILED, False)


def test_worker_with_another_number_of_processes_is_rejected(
    tiny: Callable[..., Experiment],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run = RunDir(tmp_path)
    save(
        tiny(
            "training.global_batch_size=2",
            "training.micro_batch_size=1",
            "launcher.num_processes=2",
        ),
        run.config,
    )
    assert worker.main([str(tmp_path)]) == 1
    assert "this run is for launcher.num_processes=2" in capsys.readouterr().err


def test_interrupt_that_torch_converted_to_another_error_cancels_the_run(
    second: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halfway() -> None:
        try:
            second.interrupt(signal.SIGTERM, None)
        except KeyboardInterrupt as error:
            raise RuntimeError("trying to pop from empty mode stack") from error

    monkeypatch.setattr(second, "_train", halfway)
    assert second.run() == 130
    record = read_record(second.context.run, 1)
    assert record is not None
    assert record.state is State.CANCELLED


def test_signals_after_the_first_do_not_disturb_the_end(
    second: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []

    def halfway() -> None:
        try:
            second.interrupt(signal.SIGINT, None)
        finally:
            second.interrupt(signal.SIGTERM, None)
            files.append("captures")

    monkeypatch.setattr(second, "_train", halfway)
    assert second.run() == 130
    assert files == ["captures"]


def test_worker_with_a_stuck_main_thread_writes_its_captures_and_final_state(
    second: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    codes: list[object] = []
    queue = SimpleNamespace(close=lambda: closed.append(True))
    observer = SimpleNamespace(recorder=SimpleNamespace(store=SimpleNamespace(queue=queue)))
    monkeypatch.setattr(second, "_observer", observer)
    monkeypatch.setattr(worker, "leave_process", codes.append)
    second.leave()
    assert (closed, codes) == ([True], [130])
    record = read_record(second.context.run, 1)
    assert record is not None
    assert (record.state, record.reason) == (State.CANCELLED, "interrupted")
    second.interrupt(signal.SIGTERM, None)  # raises nothing: the final state is written


@pytest.mark.parametrize("full", ["captures", "end"])
def test_worker_with_a_stuck_main_thread_ends_on_a_full_disk(
    second: Worker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    full: str,
) -> None:
    codes: list[int] = []

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if full == "captures":
        queue = SimpleNamespace(close=fail)
        observer = SimpleNamespace(recorder=SimpleNamespace(store=SimpleNamespace(queue=queue)))
        monkeypatch.setattr(second, "_observer", observer)
    else:
        monkeypatch.setattr(second, "_record", fail)
    monkeypatch.setattr(worker, "leave_process", codes.append)
    second.leave()
    assert codes == [130]
    assert "OSError: [Errno 28] No space left on device" in caplog.text
    record = read_record(second.context.run, 1)
    assert (record is not None) == (full == "captures"), "the final state is written if possible"


# In a job.


@pytest.fixture
def in_job(
    tiny: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Worker:
    """A worker of a job's first attempt."""
    monkeypatch.setenv("QUANTEXP_START", "12 0")
    run = RunDir(tmp_path)
    take_over(run)
    return Worker(run, tiny(), in_job=True)


def test_signal_in_a_job_is_a_preemption(in_job: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is not over: the scheduler may have requeued the job."""
    monkeypatch.setattr(in_job, "_train", lambda: in_job.interrupt(signal.SIGTERM, None))
    assert in_job.run() == 130
    status = read_status(in_job.context.run.status)
    assert status is not None
    assert (status.state, status.reason) == (State.PREEMPTED, "ended from outside")


def test_superseded_attempt_ends_and_writes_nothing(
    in_job: Worker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trains() -> None:
        with monkeypatch.context() as later:
            later.setenv("QUANTEXP_START", "12 1")
            take_over(in_job.context.run)
        statuses.append(in_job.context.run.status.read_bytes())
        in_job.context.set_phase(Phase.TRAINING)

    statuses: list[bytes] = []
    monkeypatch.setattr(in_job, "_train", trains)
    assert in_job.run() == 1
    assert in_job.context.run.status.read_bytes() == statuses[0]
    message = "ERROR rank 0: the run was started again elsewhere: this attempt ends"
    assert message in capsys.readouterr().err


def test_error_of_a_superseded_attempt_does_not_fail_the_run(
    in_job: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        in_job.context.run.start.unlink()
        raise RunError("its files were moved away")

    monkeypatch.setattr(in_job, "_train", fails)
    assert in_job.run() == 1
    status = read_status(in_job.context.run.status)
    assert status is not None
    assert status.state is State.RUNNING


def test_warning_of_the_scheduler_is_in_the_log(
    tiny: Callable[..., Experiment], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(RunDir(tmp_path), tiny(), in_job=True)
    worker.take_user_signal(signal.SIGUSR2, None)
    assert not worker.context.requests.dossier
    assert caplog.messages == [
        "received SIGUSR2: the scheduler will end this job in 300 s; checkpoint.optimizer=false, so none is saved"
    ]
