"""A run that was interrupted and goes on computes what an undisturbed one does, bit for bit.

`tests/hostile/test_kills.py` kills processes; here an exception ends a run at a chosen iteration.
"""

from __future__ import annotations

import gc
import json
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kills
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quantexp.config.compose import compose
from quantexp.launch.attempt import open_run
from quantexp.model.checkpoints import next_iteration
from quantexp.runs.code_digest import code_digest
from quantexp.runs.metrics import Metrics
from quantexp.runs.outcome import SAVED_BEFORE_LIMIT
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_json, read_status, write_json
from quantexp.training.megatron import collectives, step, watched_step
from quantexp.training.observer import RunObserver
from quantexp.training.requests import Request
from tests.conftest import run_here
from tests.training.megatron.state_plants import left_out

#: In this process nobody would close TensorBoard's file.
HERE = ["tracking.tensorboard=false"]


class KilledError(BaseException):
    """Stands in for a kill: nothing handles it."""


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Call a function after an iteration, once."""
    original = RunObserver.iteration

    def at(iteration: int, act: Callable[[], None]) -> None:
        def iterate(observer: RunObserver, metrics: Metrics) -> bool:
            goes_on = original(observer, metrics)
            if metrics.iteration == iteration:
                monkeypatch.setattr(RunObserver, "iteration", original)
                act()
            return goes_on

        monkeypatch.setattr(RunObserver, "iteration", iterate)

    return at


Interrupt = Callable[[int, Callable[[], None]], None]


def kill() -> None:
    raise KilledError


def restarts(run: RunDir) -> list[dict[str, Any]]:
    status = read_status(run.status)
    assert status is not None
    return status.restarts


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["stochastic", "delayed", "fp16", "muon", "eco", "pulls", "resets", "smooth"]
)
def test_run_goes_on_bit_for_bit(
    case: str, cache: Path, tmp_path: Path, interrupt: Interrupt
) -> None:
    words = [*kills.TINY, *kills.CASES[case], "training.iterations=10", *HERE]
    words += ["checkpoint.every=4", "capture.every=3", "evaluation.every=5", f"paths.cache={cache}"]

    def experiment(root: str) -> list[str]:
        return [*words, f"paths.root={tmp_path / root}"]

    undisturbed = run_here(compose(experiment("undisturbed")))
    for iteration in (2, 7):  # before the first checkpoint, and between two
        interrupt(iteration, kill)
        with pytest.raises(KilledError):
            run_here(compose(experiment("killed")))
    killed = run_here(compose(experiment("killed")))
    assert [each["goes_on_from"] for each in restarts(killed)] == [4]
    assert kills.differences(undisturbed.root, killed.root) == []
    assert sorted(path.name for path in killed.attempts.iterdir()) == ["1"]


@pytest.mark.slow
def test_run_that_goes_on_with_other_code_logs_it_and_is_not_skipped_when_completed(
    tiny_words: list[str], tmp_path: Path, interrupt: Interrupt, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *tiny_words,
        "training.iterations=3",
        "checkpoint.every=1",
        "checkpoint.optimizer=true",
    ]
    experiment = compose([*words, "capture=off", *HERE, f"paths.root={tmp_path}"])
    interrupt(2, kill)
    with pytest.raises(KilledError):
        run_here(experiment)
    (file,) = tmp_path.glob("*/provenance.json")
    before = "0123456789abcdef"
    write_json(file, {**read_json(file), "code": before})
    run = run_here(experiment)
    change = f"code {before} -> {code_digest()}"
    assert f"went on from iteration 1 with changes: {change}\n" in capsys.readouterr().err
    assert restarts(run)[-1]["changed"] == [change]
    with open_run(experiment, "cpu", []) as (folder, _):
        assert folder.notice == (
            f"completed before with other code ({before} and {code_digest()} then, {code_digest()} now): "
            "running again"
        )


@pytest.mark.slow
def test_statistics_for_trackers_are_those_of_an_undisturbed_run(
    tiny_words: list[str], tmp_path: Path, interrupt: Interrupt
) -> None:
    """The killed run has written iteration 6, which it computes again."""
    words = [
        *tiny_words,
        "training.iterations=8",
        "checkpoint.every=4",
        "checkpoint.optimizer=true",
    ]
    words += [
        "quant=linear_mxfp8",
        "capture=stats",
        "capture.every=2",
        "tracking.statistics=[amax,sqnr]",
    ]
    undisturbed = run_here(compose([*words, f"paths.root={tmp_path / 'undisturbed'}"]))
    interrupt(7, kill)
    with (
        warnings.catch_warnings()
    ):  # the end of a process closes its files, here the collector does
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(KilledError):
            run_here(compose([*words, f"paths.root={tmp_path / 'killed'}"]))
        gc.collect()
    killed = run_here(compose([*words, f"paths.root={tmp_path / 'killed'}"]))
    assert [each["goes_on_from"] for each in restarts(killed)] == [4]
    assert killed.curves.read_bytes() == undisturbed.curves.read_bytes()
    events = EventAccumulator(str(killed.tensorboard)).Reload()
    scalars = events.Scalars("sqnr_db/L1-fc2/grad_output")
    assert [event.step for event in scalars] == [2, 4, 6, 8]


SAVES = ["training.iterations=9", "checkpoint.every=4", "checkpoint.optimizer=true", *HERE]


@pytest.mark.slow
def test_signal_saves_a_checkpoint_after_the_iteration(
    run_tiny: Callable[..., RunDir], interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantexp.training.worker import Worker

    workers: list[Worker] = []
    original = Worker.__init__

    def remember(worker: Worker, *args: object, **kwargs: object) -> None:
        original(worker, *args, **kwargs)  # type: ignore[arg-type]
        workers.append(worker)

    monkeypatch.setattr(Worker, "__init__", remember)
    interrupt(6, lambda: workers[-1].interrupt(signal.SIGTERM, None))
    run = run_tiny(*SAVES, expect=130)
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.iteration) == (State.CANCELLED, 6)
    run = run_tiny(*SAVES)
    (restart,) = restarts(run)
    assert (restart["goes_on_from"], restart["lost"]) == (6, 0)


@pytest.mark.slow
def test_rank_ends_before_the_limit_when_another_one_is_asked_to(
    run_tiny: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 writes why the run ended, and SLURM's warning may reach it last: the job is requeued for that reason."""
    requests: list[Request] = []

    def largest(own: int) -> int:
        if isinstance(own, Request):  # and not a flag of another question
            requests.append(own)
        return Request.END_AT_LIMIT if len(requests) == 6 else own

    monkeypatch.setattr(collectives, "largest", largest)
    run = run_tiny(*SAVES, expect=130)
    status = read_status(run.status)
    assert status is not None
    assert requests == [Request.NONE] * 6, "this rank was not asked"
    assert (status.state, status.reason) == (State.PREEMPTED, SAVED_BEFORE_LIMIT)
    assert next_iteration(run) == 7


@pytest.mark.slow
def test_every_start_is_proved_and_the_earlier_proofs_stay(
    run_tiny: Callable[..., RunDir], interrupt: Interrupt
) -> None:
    interrupt(6, kill)
    with pytest.raises(KilledError):
        run_tiny(*SAVES, "quant=linear_mxfp8")
    run = run_tiny(*SAVES, "quant=linear_mxfp8")
    precision = json.loads(run.precision.read_text())
    assert (precision["iteration"], precision["proved"]) == (5, True)
    assert [each["iteration"] for each in precision["earlier"]] == [1]


@pytest.mark.slow
def test_run_that_stops_after_its_capture_goes_on_when_more_is_asked(
    run_tiny: Callable[..., RunDir],
) -> None:
    words = [*SAVES, "capture=stats", "capture.iterations=[2]", "checkpoint.at_end=true"]
    stopped = run_tiny(*words, "capture.stop_after_capture=true")
    assert json.loads(stopped.status.read_text())["iteration"] == 2
    run = run_tiny(*words)
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.iteration, status.goes_on_from) == (State.COMPLETED, 9, 2)


@pytest.mark.slow
def test_steps_left_out_in_a_row_are_counted_on(
    run_tiny: Callable[..., RunDir], interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third in a row ends the run, however often it starts."""
    words = ["training.iterations=9", "checkpoint.every=1", "checkpoint.optimizer=true", *HERE]
    monkeypatch.setattr(watched_step, "step_if_finite", left_out)
    monkeypatch.setattr(step, "cause", lambda chunks, losses: "the gradient of a test")
    interrupt(2, kill)
    with pytest.raises(KilledError):
        run_tiny(*words, "capture=off")
    run = run_tiny(*words, "capture=off", expect=1)
    assert "in 3 iterations in a row" in json.loads(run.status.read_text())["reason"]
    assert len(run.metrics.read_text().splitlines()) == 3
