"""The observer's output to the run folder, and the conditions under which it ends a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from quantexp.quant.step_state import StepState, use_step_state
from quantexp.runs.metrics import Metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import Rank
from quantexp.runs.status import Phase, read_status
from quantexp.schema import Experiment
from quantexp.training.context import RunContext
from quantexp.training.observer import RunObserver

FIRST = Metrics(
    iteration=1,
    loss=5.5,
    grad_norm=1.25,
    lr=1e-4,
    tokens=128,
    step_time_s=0.5,
    tokens_per_s=256.0,
    tflops=0.125,
    memory_gb=2.0,
)


@pytest.fixture
def make_observer(
    tiny: Callable[..., Experiment], tmp_path: Path
) -> Iterator[Callable[..., RunObserver]]:
    """A function that makes the observer of a rank without modules."""

    def make(*overrides: str, rank: Rank | None = None, device: str = "cpu") -> RunObserver:
        context = RunContext(RunDir(tmp_path), tiny(*overrides), rank)
        observer = RunObserver(context, torch.device(device))
        observer.built([])
        return observer

    with use_step_state(StepState(0)):
        yield make


def test_iteration_writes_a_line_of_metrics_and_its_number_in_the_status(
    make_observer: Callable[..., RunObserver], tmp_path: Path
) -> None:
    observer = make_observer("capture=off")
    assert observer.iteration(FIRST)
    assert observer.iteration(replace(FIRST, iteration=2, loss=math.nan, grad_norm=math.inf))
    lines = [json.loads(line) for line in RunDir(tmp_path).metrics.read_text().splitlines()]
    assert [(line["iteration"], line["loss"], line["grad_norm"]) for line in lines] == [
        (1, 5.5, 1.25),
        (2, None, None),
    ]
    status = read_status(RunDir(tmp_path).status)
    assert status is not None
    assert status.iteration == 2
    times = [datetime.fromisoformat(line["time"]) for line in lines]
    assert times == sorted(times)
    assert abs(times[1] - datetime.now(UTC)) < timedelta(minutes=1)


def test_step_that_is_left_out_and_its_cause_are_logged(
    make_observer: Callable[..., RunObserver], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observer = make_observer("capture=off")
    left_out = replace(FIRST, skipped=True, nonfinite="the loss of micro-batch 0 on rank 1 is nan")
    assert observer.iteration(left_out)
    assert observer.iteration(replace(FIRST, iteration=2, validation_loss=math.nan))
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "iteration 1 is left out: the loss of micro-batch 0 on rank 1 is nan",
        "the validation loss after iteration 2 is nan",
    ]
    first, second = RunDir(tmp_path).metrics.read_text().splitlines()
    assert json.loads(first)["nonfinite"] == left_out.nonfinite
    assert (json.loads(second)["nonfinite"], json.loads(second)["skipped"]) == (None, False)


def test_failure_to_write_metrics_ends_the_run(
    make_observer: Callable[..., RunObserver], tmp_path: Path
) -> None:
    observer = make_observer("capture=off")
    RunDir(tmp_path).metrics.mkdir()
    with pytest.raises(IsADirectoryError):
        observer.iteration(FIRST)


def test_rank_that_does_not_lead_writes_no_metrics(
    make_observer: Callable[..., RunObserver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quantexp.training.megatron.collectives.any_rank", lambda own: own
    )  # no process group
    assert make_observer("capture=off", rank=Rank(1, 2, 1)).iteration(FIRST)
    assert not RunDir(tmp_path).metrics.exists()


def test_lost_interrupt_ends_the_run_after_the_iteration(
    make_observer: Callable[..., RunObserver], tmp_path: Path
) -> None:
    observer = make_observer("capture=off")
    observer.context.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        observer.iteration(FIRST)
    assert RunDir(tmp_path).metrics.exists()


def test_run_ends_with_its_capture_if_configured(
    make_observer: Callable[..., RunObserver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quantexp.training.megatron.collectives.gather", lambda own: [own]
    )  # no process group
    observer = make_observer(
        "capture=stats", "capture.control_iter=2", "capture.stop_after_capture=true"
    )
    assert observer.iteration(FIRST)
    assert not observer.iteration(replace(FIRST, iteration=2))
    assert observer.context.status.reason == "stopped after capture, as configured"


def test_status_has_the_current_iteration_and_micro_batch(
    make_observer: Callable[..., RunObserver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quantexp.training.megatron.collectives.gather", lambda own: [own]
    )  # no process group
    observer = make_observer(
        "capture=stats", "capture.control_iter=2", "capture.collect_micro_batches=2"
    )
    status = observer.context.status
    places = []
    for iteration in (1, 2, 3):
        observer.proofs.is_running = iteration == 1
        for index in (0, 1):
            observer.micro_batch(iteration, index, None)
            places.append((status.phase, status.current_iteration, status.micro_batch))
        observer.gradients(iteration, None)
        places.append((status.phase, status.current_iteration, status.micro_batch))
    each = (
        (Phase.PROVING, Phase.STEPPING),
        (Phase.CAPTURING, Phase.STEPPING),
        (Phase.TRAINING,) * 2,
    )
    assert places == [
        (phase, iteration, index)
        for iteration, (passes, step) in enumerate(each, 1)
        for phase, index in ((passes, 1), (passes, 2), (step, 2))
    ]
    saved = read_status(observer.run.status)
    assert saved is not None
    assert saved.phase_since is not None
    observer.evaluation()
    assert read_status(observer.run.status).phase is Phase.EVALUATING


def test_each_iteration_updates_the_capture_queue_in_the_status(
    make_observer: Callable[..., RunObserver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quantexp.training.megatron.collectives.gather", lambda own: [own]
    )  # no process group
    observer = make_observer("capture=stats")
    status = observer.context.status
    status.capture = {"tensors": 28, "num_bytes": 9_600_000, "queue_bytes": 9_600_000}
    assert observer.iteration(FIRST)
    saved = read_status(observer.run.status)
    assert saved is not None
    assert saved.capture["queue_bytes"] == 0
