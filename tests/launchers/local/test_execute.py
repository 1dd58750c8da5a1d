"""From a run folder to its outcome, including workers that die without a message."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantexp_launchers.local import processes, slots
from quantexp_launchers.local.execute import execute
from quantexp_launchers.local.processes import RunWatch
from rich.console import Console

from quantexp.errors import RunError, RunInUseError
from quantexp.launch.outcome import outcome
from quantexp.runs.fencing import take_over
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status, write_json, write_status
from quantexp.schema import Experiment, LauncherConfig

Worker = Callable[..., int]
QUIET = Console(quiet=True)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[Worker], None]:
    """Replaces the worker process by a function."""

    def put(stand_in: Worker) -> None:
        monkeypatch.setattr(processes, "run_workers", stand_in)

    return put


def completes(run: RunDir, _: object, on_poll: Callable[[], None], *__: Any, **___: Any) -> int:
    status = read_status(run.status)
    assert status is not None
    status.state, status.iteration = State.COMPLETED, status.iterations
    status.capture = {"tensors": 3, "num_bytes": 12}
    write_status(run.status, status)
    run.metrics.write_text('{"iteration": 2, "loss": 5.0, "tokens_per_s": 1.0}\n')
    write_json(run.precision, {"entries": []})
    run.tensors.mkdir()
    (run.tensors / "manifest.jsonl").touch()
    on_poll()
    return 0


def test_outcome_is_read_from_the_folder(
    tiny: Callable[..., Experiment], worker: Callable[[Worker], None]
) -> None:
    worker(completes)
    result = execute(tiny(), QUIET)
    assert (result.state, result.skipped, result.reason) == (State.COMPLETED, False, "")
    assert result.metrics is not None
    assert result.metrics["loss"] == 5.0
    assert (result.tensors, result.num_bytes) == (3, 12)
    assert result.precision == {"entries": []}


def test_completed_run_starts_no_worker(
    tiny: Callable[..., Experiment], worker: Callable[[Worker], None]
) -> None:
    worker(completes)
    first = execute(tiny(), QUIET)

    def never(*_: Any, **__: Any) -> int:
        raise AssertionError("a worker was started")

    worker(never)
    again = execute(tiny(), QUIET)
    assert again.skipped
    assert "already completed" in again.reason
    assert again.run == first.run


def test_worker_that_dies_without_a_message_is_a_failure_in_one_line(
    tiny: Callable[..., Experiment], worker: Callable[[Worker], None]
) -> None:
    def dies(run: RunDir, *_: Any, **__: Any) -> int:
        run.rank_log(0).write_text("".join(f"line {i}\n" for i in range(30)))
        return -9

    worker(dies)
    result = execute(tiny(), QUIET)
    assert result.state is State.FAILED
    log = result.run.rank_log(0)
    assert result.reason == f"the worker was ended by SIGKILL (out of memory?); see {log}"
    status = read_status(result.run.status)
    assert status is not None
    assert status.finished is not None


def test_worker_that_dies_before_its_log_exists_is_a_failure_too(
    tiny: Callable[..., Experiment], worker: Callable[[Worker], None]
) -> None:
    def dies(*_: Any, **__: Any) -> int:
        return 1

    worker(dies)
    result = execute(tiny(), QUIET)
    log = result.run.rank_log(0)
    assert result.reason == f"the worker ended with exit code 1 and no reason; see {log}"


def test_interrupted_run_is_cancelled_even_before_its_worker_records_it(
    tiny: Callable[..., Experiment], worker: Callable[[Worker], None]
) -> None:
    def interrupted(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    worker(interrupted)
    result = execute(tiny(), QUIET)
    assert (result.state, result.reason) == (State.CANCELLED, "interrupted")
    status = read_status(result.run.status)
    assert status is not None
    assert status.state is State.CANCELLED


def test_interrupt_prints_at_once_what_it_waits_for_and_how_long(
    tiny: Callable[..., Experiment], worker: Callable[[Worker], None]
) -> None:
    def interrupted(*_: Any, on_stop: Callable[[float], None], **__: Any) -> int:
        on_stop(20.0)
        raise KeyboardInterrupt

    worker(interrupted)
    console = Console(file=io.StringIO(), width=80)
    execute(tiny(), console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == (
        "stopping: the run saves what it has, 20 s at most; Ctrl-C again stops at once\n"
    )


def test_failure_recorded_by_the_worker_is_kept(
    tiny: Callable[..., Experiment], worker: Callable[[Worker], None]
) -> None:
    def fails(run: RunDir, *_: Any, **__: Any) -> int:
        write_status(run.status, Status(State.FAILED, "loss nan"))
        return 1

    worker(fails)
    assert execute(tiny(), QUIET).reason == "loss nan"


def test_folder_that_is_no_run_is_refused(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"has no status\.json: it is not a run folder, or was never"
    ):
        outcome(tiny(), RunDir(tmp_path))


def test_more_processes_than_gpus_are_refused(
    tiny: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = tiny("training.micro_batch_size=1", "launcher.num_processes=2")
    monkeypatch.setattr(slots, "has_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        RunError,
        match=r"launcher\.num_processes=2 needs a GPU for each process and this machine has 1; lower it",
    ):
        execute(two, QUIET)


def test_run_whose_folder_was_deleted_or_taken_over_is_an_error(
    tiny: Callable[..., Experiment], worker: Callable[[Worker], None], tmp_path: Path
) -> None:
    def is_moved(run: RunDir, *_: Any, **__: Any) -> int:
        run.root.rename(tmp_path / "elsewhere")
        return 0

    def is_taken_over(run: RunDir, *_: Any, **__: Any) -> int:
        take_over(run, "another start")
        return 0

    worker(is_moved)
    with pytest.raises(RunError, match="was deleted or moved while its run executed; start the"):
        execute(tiny(), QUIET)
    worker(is_taken_over)
    with pytest.raises(RunInUseError, match="was taken over by another process, because the claim"):
        execute(tiny(), QUIET)


def test_ranks_that_stay_long_after_rank_0_has_ended_are_overdue(tmp_path: Path) -> None:
    run, seconds = RunDir(tmp_path), [1000.0]
    launcher = LauncherConfig(num_processes=2, timeout_min=1.0)
    watch = RunWatch(run, launcher, os.getpid(), lambda: seconds[0])
    assert watch.look()
    write_status(run.status, Status(State.COMPLETED, finished="2020-01-01T00:00:00+00:00"))
    assert watch.look(), "the time that counts is what this process saw pass"
    seconds[0] += 59
    assert watch.look()
    seconds[0] += 2
    assert not watch.look()
