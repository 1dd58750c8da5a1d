"""From a run folder to its outcome, deaths without a word included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra_plugins.quantexp_launcher import local
from rich.console import Console

from quantexp.errors import RunError
from quantexp.execute import execute, outcome
from quantexp.paths import RunDir
from quantexp.schema import Experiment
from quantexp.status import State, Status, read_status, write_json, write_status

Worker = Callable[..., int]
QUIET = Console(quiet=True)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[Worker], None]:
    """Puts a function in the worker process's place."""

    def put(stand_in: Worker) -> None:
        monkeypatch.setattr(local, "run_worker", stand_in)

    return put


def completes(run_dir: Path, log: Path, on_poll: Callable[[], None], **_: Any) -> int:
    run = RunDir(run_dir)
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


def test_outcome_is_what_the_folder_says(
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


def test_worker_that_died_without_a_word_is_a_failure_in_one_line(
    tiny: Callable[..., Experiment], worker: Callable[[Worker], None]
) -> None:
    def dies(run_dir: Path, log: Path, on_poll: Callable[[], None], **_: Any) -> int:
        log.write_text("".join(f"line {i}\n" for i in range(30)))
        return -9

    worker(dies)
    result = execute(tiny(), QUIET)
    assert result.state is State.FAILED
    log = result.run.rank_log(0)
    assert result.reason == f"the worker was ended by SIGKILL (out of memory?); see {log}"
    status = read_status(result.run.status)
    assert status is not None
    assert status.finished is not None


def test_worker_that_died_before_its_log_is_a_failure_too(
    tiny: Callable[..., Experiment], worker: Callable[[Worker], None]
) -> None:
    def dies(*_: Any, **__: Any) -> int:
        return 1

    worker(dies)
    result = execute(tiny(), QUIET)
    log = result.run.rank_log(0)
    assert result.reason == f"the worker ended with exit code 1 and no reason; see {log}"


def test_interrupted_run_is_cancelled_even_before_its_worker_could_say_so(
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


def test_failure_the_worker_told_is_kept(
    tiny: Callable[..., Experiment], worker: Callable[[Worker], None]
) -> None:
    def fails(run_dir: Path, *_: Any, **__: Any) -> int:
        write_status(RunDir(run_dir).status, Status(State.FAILED, "loss nan"))
        return 1

    worker(fails)
    assert execute(tiny(), QUIET).reason == "loss nan"


def test_folder_that_is_no_run_is_refused(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no status\.json: it is no run folder, or was never"):
        outcome(tiny(), RunDir(tmp_path))
