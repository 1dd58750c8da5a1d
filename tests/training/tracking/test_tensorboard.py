"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from quantexp.runs.curves import CurvesLine
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.training.tracking import tensorboard
from quantexp.training.tracking.events import TrackedRun, point

from .conftest import ITERATIONS, curves_line, line

Make = Callable[..., TrackedRun]


def read(run: RunDir) -> EventAccumulator:
    accumulator = EventAccumulator(
        str(run.tensorboard), size_guidance={"tensors": 0, "histograms": 0}
    )
    return accumulator.Reload()


def text(events: EventAccumulator, tag: str) -> str:
    (event,) = events.Tensors(tag)
    return str(event.tensor_proto.string_val[0].decode())


def hparams(events: EventAccumulator, tag: str) -> Any:
    content = events.SummaryMetadata(tag).plugin_data.content
    return metadata._parse_plugin_data_as(content, tag.rpartition("/")[2])


def test_curves_have_the_logged_values(tracked: Make) -> None:
    run = tracked()
    tracker = tensorboard.start(run)
    points = [point(line(i)) for i in (1, 2, 3)]
    tracker.log(points[:1])
    tracker.log(points[1:])
    tracker.end(State.COMPLETED, "")
    events = read(run.folder)
    assert set(events.Tags()["scalars"]) == {*points[0].scalars, "train/loss_by_tokens"}
    for tag in points[0].scalars:
        scalars = events.Scalars(tag)
        assert [event.step for event in scalars] == [1, 2, 3]
        assert [event.wall_time for event in scalars] == [p.time_s for p in points]
        # float32 has 24 bits: half a unit in the last place is 2**-24 of the value.
        expected = [pytest.approx(p.scalars[tag], rel=2**-24) for p in points]
        assert [event.value for event in scalars] == expected
    by_tokens = events.Scalars("train/loss_by_tokens")
    assert [(event.step, event.value) for event in by_tokens] == [(128, 4), (256, 3), (384, 2)]


def test_open_tensorboard_shows_an_iteration_at_once(tracked: Make) -> None:
    run = tracked()
    tracker = tensorboard.start(run)
    events = read(run.folder)
    assert events.Tags()["scalars"] == []
    for i in (1, 2):
        tracker.log([point(line(i))])
        assert [event.step for event in events.Reload().Scalars("train/loss")] == [*range(1, i + 1)]
    tracker.end(State.CANCELLED, "interrupted")


def test_values_that_are_not_finite_stay_unchanged(tracked: Make) -> None:
    run = tracked()
    tracker = tensorboard.start(run)
    tracker.log([point(line(1, loss=math.nan, grad_norm=-math.inf)), point(line(2, loss=None))])
    tracker.end(State.FAILED, "loss nan")
    events = read(run.folder)
    assert [math.isnan(event.value) for event in events.Scalars("train/loss")] == [True, True]
    assert events.Scalars("train/grad_norm")[0].value == -math.inf


def test_configuration_is_there_once_as_text(tracked: Make) -> None:
    run = tracked("training.seed=77")
    tensorboard.start(run).end(State.COMPLETED, "")
    config = text(read(run.folder), "config")
    assert config.startswith("```yaml\n")
    assert (
        yaml.safe_load(config.removeprefix("```yaml\n").removesuffix("```"))["training"]["seed"]
        == 77
    )


@pytest.mark.parametrize(
    ("state", "reason", "expected", "success"),
    [
        (State.COMPLETED, "", "completed", True),
        (State.FAILED, "loss nan", "failed: loss nan", False),
        (State.CANCELLED, "interrupted", "cancelled: interrupted", False),
    ],
)
def test_every_final_state_is_written_with_its_reason(
    tracked: Make, state: State, reason: str, expected: str, success: bool
) -> None:
    run = tracked("training.seed=77")
    tensorboard.start(run).end(state, reason)
    events = read(run.folder)
    assert text(events, "state") == expected
    start = hparams(events, metadata.SESSION_START_INFO_TAG)
    assert start.hparams["training.seed"].number_value == 77
    assert start.hparams["model.tie_embeddings"].bool_value is True
    assert start.hparams["training.precision"].string_value == "bf16"
    assert start.start_time_secs == pytest.approx(time.time(), abs=60)
    assert hparams(events, metadata.SESSION_END_INFO_TAG).status == (1 if success else 2)


def test_run_that_goes_on_has_each_iteration_once_in_every_curve(tracked: Make) -> None:
    run = tracked()
    first = tensorboard.start(run)
    first.log([point(line(i)) for i in (1, 2, 3, 4)])
    # The first process was killed, and the run goes on from its checkpoint of iteration 2.
    run.folder.metrics.write_text("".join(json.dumps(line(i)) + "\n" for i in (1, 2)))
    second = tensorboard.start(run)
    second.log([point(line(i, loss=float(i))) for i in (3, 4, 5)])
    second.end(State.COMPLETED, "")
    events = read(run.folder)
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 4), (2, 3), (3, 3), (4, 4), (5, 5)]
    by_tokens = [event.step for event in events.Scalars(tensorboard.LOSS_BY_TOKENS)]
    assert by_tokens == [i * line(i)["tokens"] for i in (1, 2, 3, 4, 5)]
    first.end(State.FAILED, "")


def test_statistics_are_curves_and_histograms_with_each_iteration_once(tracked: Make) -> None:
    run = tracked()
    first = tensorboard.start(run)
    first.log([point(line(i), cast(CurvesLine, curves_line(i))) for i in (2, 4)])
    # The first process was killed, and the run goes on from its checkpoint of iteration 2.
    run.folder.metrics.write_text("".join(json.dumps(line(i)) + "\n" for i in (1, 2)))
    run.folder.curves.write_text(json.dumps(curves_line(2)) + "\n")
    second = tensorboard.start(run)
    second.log([point(line(3)), point(line(4), cast(CurvesLine, curves_line(4)))])
    events = read(run.folder)
    amaxes = [(event.step, event.value) for event in events.Scalars("amax/L0-fc1/input")]
    assert amaxes == [(2, 2.5), (4, 4.5)]
    drawn = events.Histograms("log2_magnitude/L0/key")
    assert [event.step for event in drawn] == [2, 4]
    histogram = drawn[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (-3, 0, 9)
    assert (histogram.bucket_limit, histogram.bucket) == ([-2, -1, 0], [2, 0, 7])
    assert (histogram.sum, histogram.sum_squares) == (-3 * 2 - 7, 9 * 2 + 7)
    for tracker in (first, second):
        tracker.end(State.COMPLETED, "")


def test_full_disk_leaves_earlier_records_whole(
    tracked: Make, largest_file: Callable[[int], AbstractContextManager[None]]
) -> None:
    """The largest size of a file stands in for the disk: both stop a write halfway."""
    run = tracked()
    tracker = tensorboard.start(run)
    tracker.log([point(line(1))])
    (file,) = run.folder.tensorboard.iterdir()
    before = file.stat().st_size
    with largest_file(before + 50), pytest.raises(OSError, match="File too large"):
        tracker.log([point(line(2))])
    assert file.stat().st_size == before + 50, "half a record"
    assert [event.step for event in read(run.folder).Scalars("train/loss")] == [1]


def test_folder_that_cannot_be_created_is_an_error_of_the_system(tracked: Make) -> None:
    run = tracked()
    run.folder.tensorboard.write_text("in the way")
    with pytest.raises(FileExistsError):
        tensorboard.start(run)


def test_destination_is_the_folder(tracked: Make) -> None:
    run = tracked()
    destination = tensorboard.destination(run.experiment.tracking, run.folder)
    assert Path(destination) == run.folder.root / "tensorboard"


# Whole runs.


@pytest.mark.slow
def test_run_of_the_command_has_its_curves(real: RunDir) -> None:
    events = read(real)
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [*range(1, ITERATIONS + 1)]
    metrics = [yaml.safe_load(line) for line in real.metrics.read_text().splitlines()]
    # As above: float32.
    assert [e.value for e in losses] == [pytest.approx(m["loss"], rel=2**-24) for m in metrics]
    status = read_status(real.status)
    assert status is not None
    assert status.tracking["tensorboard"]["where"] == "tensorboard"
    assert status.tracking["tensorboard"]["iteration"] == ITERATIONS
    assert text(events, "state") == "completed"


def test_run_that_fails_or_is_interrupted_closes_its_file_with_the_reason(
    run_tiny: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["training.lr=1e30", "training.min_lr=0", "training.max_nonfinite_iterations=1"]
    failed = run_tiny(*words, "capture=off", expect=1)
    assert text(read(failed), "state").startswith("failed: stopped at iteration ")
    last = [read(failed).Scalars(f"train/{name}")[-1].value for name in ("loss", "grad_norm")]
    assert not all(map(math.isfinite, last)), "what the run failed for"

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantexp.training.megatron.step.Stepper.step", interrupt)
    cancelled = run_tiny("training.seed=9", "capture=off", expect=130)
    assert text(read(cancelled), "state") == "cancelled: interrupted"


def test_run_without_it_has_no_folder(run_tiny: Callable[..., RunDir]) -> None:
    run = run_tiny("tracking.tensorboard=false", "capture=off")
    assert not run.tensorboard.exists()
    status = read_status(run.status)
    assert status is not None
    assert status.tracking == {}


def test_event_file_that_cannot_be_written_does_not_end_the_run(
    run_tiny: Callable[..., RunDir],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Writing fails after four records: version, configuration, hyperparameters, one iteration's curves."""
    real, records = RecordWriter.write, []

    def full(self: RecordWriter, data: bytes) -> None:
        records.append(data)
        if len(records) > 4:
            raise OSError(28, "No space left on device")
        real(self, data)

    monkeypatch.setattr(RecordWriter, "write", full)
    run = run_tiny("capture=off")
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.iteration) == (State.COMPLETED, 2)
    delivery = status.tracking["tensorboard"]
    assert delivery["trouble"] == "OSError: [Errno 28] No space left on device"
    assert (delivery["iteration"], delivery["ended"]) == (0, False)
    warning = "WARNING rank 0: tracking.tensorboard: OSError: [Errno 28] No space left on device; the run continues\n"
    assert capfd.readouterr().err.count(warning) == 1
