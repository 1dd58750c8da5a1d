"""A rank's word about its end, whatever signal comes when."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp import worker
from quantexp.load import save
from quantexp.paths import RunDir
from quantexp.ranks import Rank, read_record
from quantexp.schema import Experiment
from quantexp.status import State, read_status
from quantexp.worker import Worker


@pytest.fixture
def second(tiny: Callable[..., Experiment], tmp_path: Path) -> Worker:
    """Rank 1 of two."""
    return Worker(RunDir(tmp_path), tiny(), Rank(1, 2, 1))


def test_rank_that_does_not_lead_writes_its_record_and_no_status(
    second: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second, "_train", lambda: None)
    assert second.run() == 0
    record = read_record(second.folder, 1)
    assert record is not None
    assert (record.pid, record.state) == (os.getpid(), State.COMPLETED)
    assert read_status(second.folder.status) is None


def test_signal_ends_the_training_as_cancelled(
    second: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second, "_train", lambda: second.interrupt(signal.SIGTERM, None))
    assert second.run() == 130
    record = read_record(second.folder, 1)
    assert record is not None
    assert (record.state, record.reason) == (State.CANCELLED, "interrupted")


def test_signal_that_comes_while_an_error_is_told_does_not_silence_it(
    second: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    write = worker.write_record

    def interrupted(*words: object) -> None:
        if words[-1].state is State.FAILED:  # type: ignore[attr-defined]
            second.interrupt(signal.SIGTERM, None)
        write(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(second, "_train", fails)
    monkeypatch.setattr(worker, "write_record", interrupted)
    assert second.run() == 1
    record = read_record(second.folder, 1)
    assert record is not None
    assert (record.state, record.lost_peer) == (State.FAILED, False)


def test_worker_started_with_another_number_of_processes_says_so(
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


def test_interrupt_that_torch_turned_into_another_error_is_an_interrupt(
    second: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halfway() -> None:
        try:
            second.interrupt(signal.SIGTERM, None)
        except KeyboardInterrupt as error:
            raise RuntimeError("trying to pop from empty mode stack") from error

    monkeypatch.setattr(second, "_train", halfway)
    assert second.run() == 130
    record = read_record(second.folder, 1)
    assert record is not None
    assert record.state is State.CANCELLED
