"""Whether an unfinished attempt goes on, from which checkpoint, and what is cut back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from quantexp.config.load import read
from quantexp.errors import RunError
from quantexp.launch.attempt import open_run
from quantexp.launch.going_on import continuation, cut_back, whole
from quantexp.model.checkpoint_hashes import HASHES
from quantexp.model.checkpoints import (
    folder_of,
    next_iteration,
    saved_iterations,
)
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import codes_of, read_provenance
from quantexp.runs.status import State, read_status, requeues, write_status
from quantexp.schema import Code, Experiment
from tests.launch.fake_checkpoint import save
from tests.recorded import status_of

SAVES = ("training.iterations=9", "checkpoint.every=2", "checkpoint.optimizer=true")
Tiny = Callable[..., Experiment]


@pytest.fixture
def left(tiny: Tiny) -> Callable[..., tuple[Experiment, RunDir]]:
    """An attempt that was ended at iteration 7 with checkpoints of iterations 2, 4 and 6."""

    def leave(*words: str, **fields: object) -> tuple[Experiment, RunDir]:
        experiment = tiny(*SAVES, *words)
        with open_run(experiment, "cpu", ["test"]) as (folder, _):
            run = folder.run
        status = read_status(run.status)
        assert status is not None
        ended: dict[str, object] = {
            "state": State.PREEMPTED,
            "reason": "node taken",
            "started": "2026-01-01T00:00:00+00:00",
            "iteration": 7,
            **fields,
        }
        write_status(run.status, replace(status, **ended))  # type: ignore[arg-type]
        lines = [{"iteration": i, "loss": 1.0} for i in range(1, 8)]
        run.metrics.write_text("".join(json.dumps(each) + "\n" for each in lines))
        for iteration in (2, 4, 6):
            save(run, iteration)
        return experiment, run

    return leave


Left = Callable[..., tuple[Experiment, RunDir]]


def opened(experiment: Experiment) -> tuple[RunDir, str | None]:
    with open_run(experiment, "cpu", ["quantexp", "again"]) as (folder, _):
        return folder.run, folder.notice


def iterations(run: RunDir) -> list[int]:
    return [json.loads(line)["iteration"] for line in run.metrics.read_text().splitlines()]


def test_run_goes_on_from_its_newest_checkpoint(left: Left) -> None:
    experiment, run = left()
    name = run.root.name
    assert opened(experiment) == (
        run,
        f"{name} goes on at iteration 7 (1 iteration is computed again)",
    )
    status = status_of(run)
    assert (status.state, status.goes_on_from, status.iteration) == (State.PENDING, 6, 6)
    (restart,) = status.restarts
    assert (restart["reason"], restart["iteration"]) == ("node taken", 7)
    assert (restart["goes_on_from"], restart["requeued"]) == (6, False)
    assert requeues(status) == []
    assert iterations(run) == [1, 2, 3, 4, 5, 6]
    assert saved_iterations(run) == [2, 4, 6]
    assert not run.attempts.exists()


def test_attempt_that_is_prepared_twice_says_it_once(left: Left) -> None:
    experiment, run = left()
    opened(experiment)
    assert opened(experiment) == (run, None)
    assert len(status_of(run).restarts) == 1
    assert len(read_provenance(run.provenance)["starts"]) == 1


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED, State.RUNNING])
def test_run_goes_on_whatever_ended_it(left: Left, state: State) -> None:
    experiment, run = left(state=state)
    assert opened(experiment)[0] == run
    assert status_of(run).goes_on_from == 6


def test_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(left: Left) -> None:
    experiment, run = left()
    weights = folder_of(run, 6) / "model.safetensors"
    weights.write_bytes(bytes(8) + b"weIghts")
    (folder_of(run, 4) / HASHES).unlink()
    assert whole(run)[0] == 2
    _, notice = opened(experiment)
    assert notice is not None
    assert notice.splitlines() == [
        f"{run.root.name} goes on at iteration 3 (5 iterations are computed again)",
        f"not from a later checkpoint: {weights} is damaged: its content is not what was saved",
        f"not from a later checkpoint: {folder_of(run, 4) / HASHES} is missing",
    ]
    assert iterations(run) == [1, 2]
    assert saved_iterations(run) == [2], "the damaged ones are written again"


def test_without_a_whole_checkpoint_the_run_begins_again_and_says_why(left: Left) -> None:
    experiment, run = left()
    for iteration in (2, 4, 6):
        (folder_of(run, iteration) / HASHES).unlink()
    _, notice = opened(experiment)
    assert notice is not None
    assert notice.startswith(f"begins again at its first iteration: {folder_of(run, 6)}")
    assert status_of(run).goes_on_from is None
    assert (run.attempts / "1" / "metrics.jsonl").exists()


def test_checkpoints_without_a_training_state_are_passed_over(left: Left) -> None:
    experiment, run = left()
    save(run, 7, state=False)
    assert next_iteration(run) == 7
    opened(experiment)
    assert saved_iterations(run) == [2, 4, 6], "that of iteration 7 is written again"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("capture=stats",), "it captures what the attempt so far did not"),
        (
            ("evaluation.every=3", "evaluation.samples=4"),
            "it evaluates otherwise than the attempt so far",
        ),
    ],
)
def test_run_that_asks_for_more_than_was_recorded_begins_again(
    left: Left, tiny: Tiny, words: tuple[str, ...], why: str
) -> None:
    _, run = left("capture=off")
    again = opened(tiny(*SAVES, "capture=off", *words))
    assert again == (run, f"begins again at its first iteration: {why}")


def test_restart_starts_over_and_is_not_kept_for_later(left: Left, tiny: Tiny) -> None:
    _, run = left()
    assert opened(tiny(*SAVES, "training.restart=true")) == (run, None)
    assert (run.attempts / "1" / "checkpoints").is_dir()
    assert not run.checkpoints.exists()
    assert not read(run.config).training.restart


def test_completed_run_does_not_go_on_but_one_stopped_after_its_capture_does(left: Left) -> None:
    experiment, run = left(state=State.COMPLETED, iteration=9)
    assert continuation(experiment, run) == (None, None)
    write_status(run.status, replace(status_of(run), iteration=7))
    point, _ = continuation(experiment, run)
    assert point is not None
    assert point.iteration == 6


def test_other_layout_is_recorded(left: Left, tiny: Tiny) -> None:
    experiment, run = left("training.global_batch_size=2", "training.micro_batch_size=1")
    experiment.parallel.tensor = experiment.launcher.num_processes = 2
    experiment.paths.run = run.root.name
    assert opened(experiment)[0] == run
    (restart,) = status_of(run).restarts
    assert "tensor 1 -> 2" in restart["changed"]
    (start,) = read_provenance(run.provenance)["starts"]
    assert "tensor 1 -> 2" in start["changed"]
    assert (start["goes_on_from"], start["command"]) == (6, ["quantexp", "again"])
    assert read(run.config).parallel.tensor == 2


def test_other_layout_needs_a_checkpoint_and_the_same_run(left: Left, tiny: Tiny) -> None:
    experiment, run = left("training.global_batch_size=2", "training.micro_batch_size=1")
    experiment.paths.run, experiment.launcher.num_processes = run.root.name, 2
    for iteration in (2, 4, 6):
        (folder_of(run, iteration) / HASHES).unlink()
    with pytest.raises(RunError, match=r"cannot take another layout: begins again .*; start it an"):
        opened(experiment)
    experiment.training.lr = 1.0
    with pytest.raises(RunError, match=r"paths\.run=.* is no folder of this run in another layout"):
        opened(experiment)


def test_source_of_the_first_start_goes_on_unless_the_present_one_is_asked_for(
    left: Left, tiny: Tiny
) -> None:
    experiment, run = left()
    recorded = json.loads(run.provenance.read_text())
    recorded["source"]["snapshot"] = "0123456789abcdef"
    run.provenance.write_text(json.dumps(recorded))
    with pytest.raises(RunError, match=r"is gone from .*; code=current goes on with the present"):
        opened(experiment)
    experiment.code = Code.current
    opened(experiment)
    (start,) = read_provenance(run.provenance)["starts"]
    snapshot = read_provenance(run.provenance)["source"]["snapshot"]
    assert start["changed"] == [f"source 0123456789abcdef -> {snapshot}"]
    assert read(run.config).code is Code.recorded


def test_other_code_is_told_and_recorded_where_a_run_goes_on_with_it(left: Left) -> None:
    experiment, run = left()
    recorded = json.loads(run.provenance.read_text())
    now, before = recorded["code"], "0123456789abcdef"
    recorded["code"] = before
    run.provenance.write_text(json.dumps(recorded))
    _, notice = opened(experiment)
    assert notice is not None
    assert notice.splitlines()[1:] == [f"changed: code {before} -> {now}"]
    provenance = read_provenance(run.provenance)
    assert codes_of(provenance) == [before, now]
    assert provenance["starts"][0]["changed"] == [f"code {before} -> {now}"]
    assert status_of(run).restarts[-1]["changed"] == [f"code {before} -> {now}"]
    assert opened(experiment) == (run, None), "prepared again, it says it once"
    assert codes_of(read_provenance(run.provenance)) == [before, now]


def test_other_versions_of_packages_are_recorded(left: Left) -> None:
    experiment, run = left()
    recorded = json.loads(run.provenance.read_text())
    now = recorded["packages"]["torch"]
    recorded["packages"]["torch"] = "2.0"
    run.provenance.write_text(json.dumps(recorded))
    opened(experiment)
    assert read_provenance(run.provenance)["starts"][0]["changed"] == [f"torch 2.0 -> {now}"]


def test_cutting_back_again_changes_nothing(left: Left) -> None:
    """A command that is killed while it cuts back leaves a folder that the next one completes."""
    _, run = left()
    (run.checkpoints / ".iteration_00000006.removed").mkdir()
    for _ in range(2):
        cut_back(run, None, 4)
        assert iterations(run) == [1, 2, 3, 4]
        assert sorted(p.name for p in run.checkpoints.iterdir()) == [
            "iteration_00000002",
            "iteration_00000004",
        ]


def test_statistics_for_trackers_are_cut_back_with_the_metrics(left: Left) -> None:
    _, run = left()
    lines = [f'{{"iteration": {i}, "scalars": {{"amax/L0/key": 1.5}}}}\n' for i in (2, 4, 6)]
    run.curves.write_text("".join(lines) + '{"iteration": 7, "sc')
    for _ in range(2):
        cut_back(run, None, 4)
        assert run.curves.read_text() == "".join(lines[:2])


def test_line_that_a_killed_process_did_not_finish_is_cut(left: Left) -> None:
    _, run = left()
    with run.metrics.open("a") as stream:
        stream.write('{"iteration": 8, "lo')
    cut_back(run, None, 7)
    assert iterations(run) == [1, 2, 3, 4, 5, 6, 7]
