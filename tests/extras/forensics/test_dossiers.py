"""Dossiers of real trainings: what they hold is what a capture of the same iterations holds."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantexp.capture.check.folder import check
from quantexp.capture.lines import lists_of, samples_of
from quantexp.capture.store.manifest import MANIFEST, STATISTICS, lines_of
from quantexp.extras.forensics import dossiers
from quantexp.extras.forensics.ring.triggers import Fired, Triggers
from quantexp.launch.attempt import open_run
from quantexp.runs.dossiers import Dossier, Trigger, folder_of, read_dossiers, request_dossier
from quantexp.runs.metrics import Metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import Experiment
from quantexp.training.worker import Worker

Tiny = Callable[..., Experiment]
Trained = Callable[..., RunDir]

WORDS = ("training.iterations=11", "quant=FA_linear_mxfp8", "capture=off")
FIRES_AT = 9


@pytest.fixture
def trained(tiny: Tiny, tmp_path: Path) -> Trained:
    """Train an experiment in this process, in a folder of runs of its own; `before` is called before it starts."""

    def train(*words: str, before: Callable[[Worker], object] = lambda worker: None) -> RunDir:
        root = tmp_path / f"runs{len(list(tmp_path.iterdir()))}"
        experiment = tiny(*words, f"paths.root={root}")
        with open_run(experiment, "cpu", ["test"]) as (folder, _):
            worker = Worker(folder.run, experiment)
            before(worker)
            assert worker.run() == 0, folder.run.status.read_text()
        return folder.run

    return train


@pytest.fixture
def fires(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trigger fires after one iteration, and wants to fire again in each of the following ones."""

    def of_metrics(self: Triggers, metrics: Metrics) -> Fired | None:
        fired = Fired(Trigger.LOSS, "loss 9 is planted")
        return fired if metrics.iteration >= FIRES_AT else None

    monkeypatch.setattr(Triggers, "of_metrics", of_metrics)


def listed(folder: Path, name: str, *iterations: int) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {
        (line["iteration"], line["layer"], line["module"], line["operation"], line["tensor"]): line
        for file in lists_of(folder, name)
        for line in lines_of(file)
        if line["iteration"] in iterations
    }


@pytest.mark.usefixtures("fires")
def test_dossier_has_what_a_capture_of_the_same_iterations_has(trained: Trained) -> None:
    captured = trained(*WORDS[:2], "capture=tensors", "capture.iterations=[2-10]")
    run = trained(*WORDS, "capture.ring=8")
    (dossier,) = read_dossiers(run)
    assert replace(dossier, time="", num_bytes=0) == Dossier(
        FIRES_AT, "", Trigger.LOSS, "loss 9 is planted", [2, 9], None, FIRES_AT + 1, 56
    )
    folder = folder_of(run, FIRES_AT)

    held = range(2, FIRES_AT + 1)
    expected, found = (listed(f, STATISTICS, *held) for f in (captured.tensors, folder))
    assert len(found) == 8 * 56
    assert found.keys() == expected.keys()
    for key, line in found.items():
        statistics = dict(line["statistics"])
        fidelity = statistics.pop("fidelity", None)
        assert statistics == expected[key]["statistics"], key
        assert (fidelity is not None) == (
            key[-1] in {"input", "weight", "query", "key"}
            or (key[-1] == "grad_output" and key[2] != "attention")
        ), key

    expected, found = (listed(f, MANIFEST, FIRES_AT + 1) for f in (captured.tensors, folder))
    assert found.keys() == expected.keys()
    assert all(line["hash"] == expected[key]["hash"] for key, line in found.items())
    files = {line["file"]: line["bytes"] for line in expected.values()}
    assert dossier.num_bytes == sum(files.values())
    assert check(folder, {}).problems == []
    status = read_status(run.status)
    assert status is not None
    assert status.dossiers == [FIRES_AT]


@pytest.mark.usefixtures("fires")
def test_dossier_has_the_tokens_of_its_iterations(trained: Trained) -> None:
    words = ["capture=tensors", "capture.iterations=[2-10]", "capture.collect_micro_batches=0"]
    captured = trained(*WORDS[:2], *words)
    run = trained(*WORDS, "capture.ring=8")
    assert samples_of(folder_of(run, FIRES_AT)) == samples_of(captured.tensors)


def test_a_trigger_fires_again_where_it_is_much_farther_out(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = {9: 12.0, 10: 40.0, 11: 49.0, 12: 150.0, 13: 190.0, 22: 11.0, 23: 11.0}

    def of_metrics(self: Triggers, metrics: Metrics) -> Fired | None:
        deviations = far.get(metrics.iteration)
        return None if deviations is None else Fired(Trigger.LOSS, "planted", deviations)

    monkeypatch.setattr(Triggers, "of_metrics", of_metrics)
    words = [*WORDS, "capture.ring=8", "training.iterations=24", "capture.trigger.most=3"]
    run = trained(*words)
    assert [each.iteration for each in read_dossiers(run)] == [9, 11, 22]
    assert [each.whole_iteration for each in read_dossiers(run)] == [10, 12, 23]


@pytest.mark.usefixtures("fires")
def test_last_iteration_has_no_values_after_it(trained: Trained) -> None:
    run = trained(*WORDS, f"training.iterations={FIRES_AT}", "capture.ring=8")
    (dossier,) = read_dossiers(run)
    assert (dossier.whole_iteration, dossier.tensors) == (None, 0)
    assert not (folder_of(run, FIRES_AT) / MANIFEST).exists()


@pytest.mark.usefixtures("fires")
def test_dossier_without_room_has_no_values(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dossiers.Dossiers, "_free_bytes", lambda self: 4_000_000)
    run = trained(*WORDS, "capture.ring=8")
    (dossier,) = read_dossiers(run)
    assert dossier.whole_iteration is None
    assert (
        "the dossier of iteration 9 has no values: they take 2.4 MB, and the disk has 4.0 MB free\n"
        in capsys.readouterr().err
    )


def test_request_without_a_ring_leaves_the_values_of_the_next_iteration(trained: Trained) -> None:
    def ask(worker: Worker) -> None:
        request_dossier(worker.context.run)

    run = trained("capture=off", "training.iterations=3", before=ask)
    (dossier,) = read_dossiers(run)
    assert (dossier.iteration, dossier.trigger, dossier.ring) == (1, Trigger.REQUEST, None)
    assert dossier.whole_iteration == 2
    assert dossier.tensors == 56
    folder = folder_of(run, 1)
    assert {key[0] for key in listed(folder, STATISTICS, 1, 2, 3)} == {2}
    assert check(folder, {}).problems == []
    assert not run.capture_request.exists()


def test_signal_asks_for_a_dossier(trained: Trained) -> None:
    def send(worker: Worker) -> None:
        worker.take_user_signal(signal.SIGUSR2, None)

    run = trained("capture=stats", "training.iterations=3", before=send)
    assert [each.words for each in read_dossiers(run)] == ["requested from outside"]
    assert listed(run.tensors, STATISTICS, 1), "the capture goes on beside it"


def test_dossier_that_cannot_be_written_does_not_end_the_run(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(worker: Worker) -> None:
        worker.context.run.dossiers.write_text("a file in the place of the folder")
        request_dossier(worker.context.run)

    trained("capture=off", "training.iterations=3", before=ask)
    assert (
        "the dossier of iteration 1 is not complete: captured tensors cannot be written to "
        in capsys.readouterr().err
    )


def test_left_out_steps_and_their_dossier_are_in_the_status(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantexp.training.megatron import finite, step, watched_step
    from tests.training.megatron.state_plants import left_out

    original = finite.step_if_finite
    calls = []

    def second_is_left_out(*args: Any) -> tuple[bool, float]:
        calls.append(args)
        return left_out(*args) if len(calls) == 2 else original(*args)

    monkeypatch.setattr(watched_step, "step_if_finite", second_is_left_out)
    monkeypatch.setattr(step, "cause", lambda chunks, losses: "3 NaN in a gradient")
    run = trained(*WORDS, "training.iterations=4", "capture.ring=8")
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.skipped) == (State.COMPLETED, 1)
    assert status.nonfinite == "iteration 2: 3 NaN in a gradient"
    (dossier,) = read_dossiers(run)
    assert (dossier.trigger, dossier.ring, dossier.whole_iteration) == (
        Trigger.NONFINITE,
        [1, 2],
        3,
    )
