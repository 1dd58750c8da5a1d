"""When a completed run is skipped, and when it runs again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from quantexp import __version__
from quantexp.launch.attempt import open_run
from quantexp.launch.reuse import covers
from quantexp.runs.code_digest import code_digest
from quantexp.runs.paths import RunDir
from quantexp.runs.status import (
    INTERRUPTED,
    State,
    read_json,
    read_status,
    write_json,
    write_status,
)
from quantexp.schema import CaptureConfig, CaptureLevel, CaptureValues, Experiment, StoreKind

from .attempts import complete, contents, opening


@pytest.mark.parametrize("state", [s for s in State if s is not State.COMPLETED])
def test_run_that_did_not_complete_runs_again(experiment: Experiment, state: State) -> None:
    run, _ = opening(experiment)
    complete(run)
    status = read_status(run.status)
    assert status is not None
    write_status(run.status, replace(status, state=state))
    assert opening(experiment)[1] is None


def test_run_with_less_than_the_requested_capture_runs_again(experiment: Experiment) -> None:
    complete(opening(experiment)[0])
    experiment.capture.attn_weights = True
    assert opening(experiment)[1] is None


def test_run_with_more_than_the_requested_capture_is_skipped(experiment: Experiment) -> None:
    complete(opening(experiment)[0])
    experiment.capture.level = CaptureLevel.stats
    assert opening(experiment)[1] is not None


def test_run_that_stopped_after_its_capture_is_no_complete_run(experiment: Experiment) -> None:
    experiment.capture.stop_after_capture = True
    complete(opening(experiment)[0], iteration=1)
    assert opening(experiment)[1] is not None
    experiment.capture.stop_after_capture = False
    assert opening(experiment)[1] is None


def test_completed_run_whose_configuration_broke_runs_again(experiment: Experiment) -> None:
    run, _ = opening(experiment)
    complete(run)
    run.config.write_text("a: [")
    assert opening(experiment)[1] is None


FULL = CaptureConfig(level=CaptureLevel.tensors, first_iteration=2, control_iter=3)


@pytest.mark.parametrize(
    ("earlier", "requested", "covered"),
    [
        ({}, {}, True),
        ({"level": CaptureLevel.stats}, {}, False),
        ({}, {"level": CaptureLevel.stats}, True),
        ({"level": CaptureLevel.off}, {"level": CaptureLevel.off}, True),
        ({"dir": "/a"}, {"level": CaptureLevel.off}, True),
        ({}, {"first_iteration": 1, "control_iter": 4}, False),
        ({}, {"first_iteration": 3, "control_iter": 2}, True),
        ({}, {"control_iter": 4}, False),
        ({}, {"control_iter": 0}, False),
        ({"control_iter": 0}, {"control_iter": 9}, True),
        ({"control_iter": 99}, {"control_iter": 0}, True),
        ({}, {"collect_micro_batches": 2}, False),
        ({"collect_micro_batches": 2}, {}, True),
        ({"collect_micro_batches": 0}, {"collect_micro_batches": 9}, True),
        ({"collect_micro_batches": 9}, {"collect_micro_batches": 0}, False),
        ({}, {"values": CaptureValues.after}, False),
        ({"values": CaptureValues.after}, {}, False),
        ({"values": CaptureValues.both}, {"values": CaptureValues.after}, True),
        ({"values": CaptureValues.both}, {}, True),
        ({}, {"attn_weights": True}, False),
        ({"attn_weights": True}, {}, True),
        ({}, {"residual": True}, False),
        ({}, {"weight_grads": True}, False),
        ({"weight_grads": True}, {"weight_grads": True}, True),
        ({}, {"format": "mxfp8"}, False),
        ({"format": "mxfp8"}, {}, True),
        ({}, {"dir": "/elsewhere"}, False),
        ({}, {"store": StoreKind.safetensors}, False),
        ({}, {"store": StoreKind.safetensors, "level": CaptureLevel.stats}, True),
        ({"stop_after_capture": True, "name": "a"}, {"name": "b"}, True),
    ],
)
def test_capture_covers_a_request_for_no_more(
    earlier: dict[str, object], requested: dict[str, object], covered: bool
) -> None:
    captures = replace(FULL, **earlier), replace(FULL, **requested)  # type: ignore[arg-type]
    assert covers(*captures, iterations=10) is covered


def test_completed_run_whose_tensors_are_gone_runs_again(experiment: Experiment) -> None:
    run, _ = opening(experiment)
    complete(run)
    (run.tensors / "bf16" / "x.pt").unlink()
    assert opening(experiment)[1] is None


def test_completed_run_of_other_versions_runs_again_with_a_message(experiment: Experiment) -> None:
    run, _ = opening(experiment)
    complete(run)
    content = json.loads(run.provenance.read_text())
    content["packages"]["torch"] = "2.0.0"
    run.provenance.write_text(json.dumps(content))
    with open_run(experiment, "cpu", []) as (folder, _):
        assert folder.skipped is None
        assert folder.notice is not None
        assert "completed before with other versions (torch 2.0.0 then, " in folder.notice
    assert (run.attempts / "1" / "status.json").is_file()


OTHER = "0123456789abcdef"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"code": OTHER}, f"code ({OTHER} then, NOW now)"),
        ({"code": None}, "code (not recorded then, NOW now)"),
        ({"starts": OTHER}, f"code (NOW and {OTHER} then, NOW now)"),
        (
            {"code": OTHER, "quantexp": "0.0.1"},
            f"code ({OTHER} then, NOW now) and versions (quantexp 0.0.1 then, {__version__} now)",
        ),
    ],
)
def test_completed_run_of_other_code_runs_again_with_a_message(
    experiment: Experiment, changes: dict[str, Any], words: str
) -> None:
    """None stands for a run of an earlier version; a start may have gone on with other code."""
    run, _ = opening(experiment)
    complete(run)
    content = read_json(run.provenance)
    assert content["code"] == code_digest()
    if "starts" in changes:
        start = {"created": "2026", "goes_on_from": 1, "host": "", "folder": "", "command": []}
        changes = {"starts": [{**start, "changed": [], "code": OTHER}]}
    changed = {key: value for key, value in {**content, **changes}.items() if value is not None}
    write_json(run.provenance, changed)
    before = contents(run.root)
    with open_run(experiment, "cpu", []) as (folder, _):
        assert folder.skipped is None
        expected = f"completed before with other {words}: running again"
        assert folder.notice == expected.replace("NOW", code_digest())
    assert contents(run.attempts / "1") == before
    assert read_json(run.provenance)["code"] == code_digest()


BEFORE, END, AFTER = (f"2026-01-01T00:00:0{n}.000+00:00" for n in range(3))


def ends(experiment: Experiment, state: State, reason: str = "") -> RunDir:
    """Leave a run that ended in this state at END."""
    run, _ = opening(experiment)
    status = read_status(run.status)
    assert status is not None
    status.state, status.reason, status.started, status.finished = state, reason, BEFORE, END
    status.iteration = status.iterations
    write_status(run.status, status)
    (run.tensors).mkdir()
    (run.tensors / "statistics.jsonl").write_text("")
    (run.tensors / "manifest.jsonl").write_text("")
    return run


@pytest.mark.parametrize(
    ("state", "reason", "settled"),
    [
        (State.FAILED, "loss nan", True),
        (State.CANCELLED, "cancelled by its user", True),
        (State.CANCELLED, INTERRUPTED, False),
        (State.RUNNING, "", False),
    ],
)
def test_end_of_an_attempt_counts_for_earlier_requests(
    experiment: Experiment, state: State, reason: str, settled: bool
) -> None:
    run = ends(experiment, state, reason)
    with open_run(experiment, "cpu", [], since=BEFORE) as (folder, _):
        assert folder.settled is settled
        assert folder.ready is not settled
    assert (run.attempts / "1").exists() is not settled


@pytest.mark.parametrize("since", [None, AFTER, END])
def test_end_of_an_earlier_attempt_does_not_count(
    experiment: Experiment, since: str | None
) -> None:
    ends(experiment, State.FAILED, "loss nan")
    with open_run(experiment, "cpu", [], since=since) as (folder, _):
        assert folder.ready


@pytest.mark.parametrize(("since", "skipped"), [(None, False), (BEFORE, True), (AFTER, False)])
def test_run_forced_meanwhile_is_not_forced_again(
    experiment: Experiment, since: str | None, skipped: bool
) -> None:
    ends(experiment, State.COMPLETED)
    experiment.force = True
    with open_run(experiment, "cpu", [], since=since) as (folder, _):
        assert (folder.skipped is not None) is skipped


def test_damaged_attempt_does_not_count(experiment: Experiment) -> None:
    run = ends(experiment, State.FAILED, "loss nan")
    run.status.write_text("{")
    with open_run(experiment, "cpu", [], since=BEFORE) as (folder, _):
        assert folder.ready
