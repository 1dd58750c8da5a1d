"""Opening a run folder: skipping, attempts, the lock, provenance."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantexp import __version__
from quantexp.config.compose import compose
from quantexp.config.load import read
from quantexp.errors import RunError, RunInUseError
from quantexp.launch import attempt
from quantexp.launch.attempt import open_run, run_folder, set_aside
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


@pytest.fixture(scope="module")
def composed() -> Experiment:
    return compose(["training=fast", "quant=FA_mxfp8", "model.num_layers=1"], None, {})


@pytest.fixture
def experiment(composed: Experiment, tmp_path: Path) -> Experiment:
    own = copy.deepcopy(composed)
    own.paths.root = str(tmp_path / "runs")
    return own


def opening(experiment: Experiment) -> tuple[RunDir, str | None]:
    with open_run(experiment, "cpu", ["quantexp", "training=fast"]) as (folder, _):
        return folder.run, folder.skipped


def begin(run: RunDir) -> None:
    """Leave the folder as a started run does."""
    status = read_status(run.status)
    assert status is not None
    write_status(run.status, replace(status, state=State.CANCELLED, started="2026-01-01"))


def complete(run: RunDir, iteration: int | None = None) -> None:
    """Leave the folder as a completed run does."""
    status = read_status(run.status)
    assert status is not None
    status.state, status.finished = State.COMPLETED, "2026-01-01"
    status.iteration = status.iterations if iteration is None else iteration
    write_status(run.status, status)
    run.metrics.write_text('{"iteration": 1}\n')
    tensors = run.captured(read(run.config).capture.dir)
    (tensors / "bf16").mkdir(parents=True, exist_ok=True)
    (tensors / "bf16" / "x.pt").write_text("values")
    for name in ("manifest.jsonl", "statistics.jsonl"):
        (tensors / name).write_text('{"file": "bf16/x.pt"}\n')


def test_new_folder_holds_configuration_provenance_and_status(experiment: Experiment) -> None:
    run, skipped = opening(experiment)
    assert skipped is None
    assert run.root.parent == Path(experiment.paths.root)
    assert run.root.name.startswith("llama32-1b_wikipedia_FA_mxfp8-")
    assert read(run.config) == experiment
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.iterations) == (State.PENDING, 8)
    assert run.logs.is_dir()


def test_completed_run_is_skipped_with_a_message(experiment: Experiment) -> None:
    complete(opening(experiment)[0])
    run, skipped = opening(experiment)
    assert skipped is not None
    assert skipped.startswith("already completed 2026-01-01 with all requested captures")
    assert "force=true" in skipped
    assert not run.attempts.exists()


@pytest.mark.parametrize("state", [s for s in State if s is not State.COMPLETED])
def test_run_that_did_not_complete_runs_again(experiment: Experiment, state: State) -> None:
    run, _ = opening(experiment)
    complete(run)
    status = read_status(run.status)
    assert status is not None
    write_status(run.status, replace(status, state=state))
    assert opening(experiment)[1] is None


def test_new_attempt_moves_the_earlier_one_aside_untouched(experiment: Experiment) -> None:
    run, _ = opening(experiment)
    complete(run)
    (run.tensors / "bf16").mkdir(parents=True, exist_ok=True)
    (run.tensors / "bf16" / "a.pt").write_bytes(b"tensor")
    before = contents(run.root)
    experiment.force = True
    _, skipped = opening(experiment)
    assert skipped is None
    assert contents(run.attempts / "1") == before
    assert not run.tensors.exists()
    assert not run.metrics.exists()
    begin(run)
    opening(experiment)
    assert sorted(p.name for p in run.attempts.iterdir()) == ["1", "2"]
    assert contents(run.attempts / "1") == before


def contents(folder: Path) -> dict[str, bytes]:
    """The files of an attempt; the lock and the fencing token belong to the folder."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in (".lock", ".start"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_tensors_in_another_folder_are_set_aside_with_the_attempt(
    experiment: Experiment, tmp_path: Path
) -> None:
    experiment.capture.dir = str(tmp_path / "big")
    run, _ = opening(experiment)
    elsewhere = run.captured(experiment.capture.dir)
    elsewhere.mkdir(parents=True)
    (elsewhere / "manifest.jsonl").write_text("first\n")
    begin(run)
    opening(experiment)
    assert [p.name for p in elsewhere.iterdir()] == ["attempts"]
    assert (elsewhere / "attempts" / "1" / "manifest.jsonl").read_text() == "first\n"
    assert (run.attempts / "1" / "status.json").is_file()


def test_capture_below_the_root_itself_sets_nothing_aside_twice(experiment: Experiment) -> None:
    experiment.capture.dir = experiment.paths.root
    begin(opening(experiment)[0])
    run, _ = opening(experiment)
    assert (run.attempts / "1" / "config.yaml").is_file()
    assert run.config.is_file()


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


# Which capture covers which.

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


# The lock, and folders that cannot be written.

HOLDER = """\
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_folder_in_use_by_another_process_is_refused(experiment: Experiment) -> None:
    run, _ = opening(experiment)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        before = contents(run.root)
        with pytest.raises(RunError, match="is in use by another process; wait for it, or stop it"):
            opening(experiment)
        status = read_status(run.status)
        assert status is not None
        status.pid, status.host = holder.pid, "here"
        write_status(run.status, status)
        with pytest.raises(RunError, match=f"is in use by process {holder.pid} on here; wait for"):
            opening(experiment)
        before.pop("status.json")
        assert before.items() <= contents(run.root).items()
        assert holder.stdin is not None
        holder.stdin.close()
    assert opening(experiment)[1] is None, "the holder's end releases the folder"


def test_lock_is_held_while_open_and_released_after(experiment: Experiment) -> None:
    with open_run(experiment, "cpu", []) as (folder, _):
        other = os.open(folder.run.lock, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_root_that_cannot_be_written_is_named_with_the_remedy(
    experiment: Experiment, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    experiment.paths.root = str(tmp_path / "file" / "runs")
    with pytest.raises(
        RunError, match=r"the run folder .*file/runs/.* cannot be written: Not a directory; set pat"
    ):
        opening(experiment)


def test_folder_of_another_user_is_read_and_not_written(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = opening(experiment)
    complete(run)
    monkeypatch.setattr(attempt, "may_write", lambda run: False)
    before = {path: path.stat().st_mtime_ns for path in run.root.rglob("*")}
    with open_run(experiment, "cpu", []) as (folder, lock):
        assert (folder.ready, lock) == (False, None)
        assert (folder.skipped or "").startswith("already completed")
    experiment.force = True
    with pytest.raises(
        RunError, match=r"is another user's, who alone may write it, and .*; set pat"
    ):
        opening(experiment)
    assert {path: path.stat().st_mtime_ns for path in run.root.rglob("*")} == before


def test_attempt_that_cannot_be_set_aside_is_a_clean_error(experiment: Experiment) -> None:
    run, _ = opening(experiment)
    begin(run)
    run.attempts.write_text("in the way")
    with pytest.raises(RunError, match=r"the run folder .* cannot be written: .*; set paths\.root"):
        opening(experiment)


# Provenance.


def test_provenance_has_what_ran_and_no_environment(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret-of-the-environment")
    run, _ = opening(experiment)
    content = json.loads(run.provenance.read_text())
    assert content["quantexp"] == __version__
    assert {"torch", "megatron-core", "hydra-core", "omegaconf", "numpy"} <= {
        name for name, version in content["packages"].items() if version
    }
    assert content["command"] == ["quantexp", "training=fast"]
    assert content["identity"]["training"]["seed"] == 1234
    assert content["identity"]["scheme"][0][0] == 1
    assert {"python", "host", "platform", "folder", "created", "source"} <= set(content)
    assert "secret-of-the-environment" not in run.provenance.read_text()
    assert "environment" not in content


def test_logs_are_private_and_the_rest_follows_the_umask(
    experiment: Experiment,
) -> None:
    before = os.umask(0o022)
    try:
        run, _ = opening(experiment)
    finally:
        os.umask(before)
    assert stat.S_IMODE(run.logs.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.root.stat().st_mode) == 0o755
    assert stat.S_IMODE(run.provenance.stat().st_mode) == 0o644


def test_secret_of_the_environment_on_the_command_line_is_not_in_the_provenance(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret-of-the-environment")
    words = ["quantexp", "--config-dir", "/home/secret-of-the-environment", "a=https://me:word@b"]
    with open_run(experiment, "cpu", words) as (folder, _):
        command = json.loads(folder.run.provenance.read_text())["command"]
    assert command == ["quantexp", "--config-dir", "/home/<SOME_TOKEN>", "a=https://b"]


def test_secret_of_the_environment_in_an_uncommitted_change_is_not_in_the_provenance(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret-of-the-environment")
    diff = "+token = 'secret-of-the-environment'"
    monkeypatch.setattr(
        "quantexp.runs.provenance.checkout", lambda: {"commit": "0" * 40, "diff": diff}
    )
    run, _ = opening(experiment)
    assert json.loads(run.provenance.read_text())["source"]["diff"] == "+token = '<SOME_TOKEN>'"


# Earlier attempts.


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


@pytest.mark.slow
@pytest.mark.parametrize("file", ["status.json", "provenance.json"])
@pytest.mark.parametrize("force", ["true", "false"])
def test_damaged_attempt_is_set_aside_with_a_message(
    tiny: Callable[..., Experiment], file: str, force: str
) -> None:
    run, _ = opening(tiny())
    complete(run)
    (run.root / file).write_text("{")
    with open_run(tiny(f"force={force}"), "cpu", []) as (folder, _):
        assert folder.skipped is None
        if file == "status.json" or force == "false":
            assert folder.notice is not None
            assert "an earlier attempt cannot be read (" in folder.notice
    assert (run.attempts / "1" / file).read_text() == "{"


def test_space_for_the_last_messages_is_reserved(experiment: Experiment) -> None:
    run, _ = opening(experiment)
    assert run.reserve.stat().st_size == 1 << 16


def test_attempt_that_never_started_is_no_attempt(experiment: Experiment) -> None:
    """A sweep prepares all its folders first; the start of a run prepares its folder again."""
    run, _ = opening(experiment)
    experiment.capture.level = CaptureLevel.stats
    assert opening(experiment) == (run, None)
    assert not run.attempts.exists()
    assert read(run.config).capture.level is CaptureLevel.stats


def test_run_that_waits_in_a_scheduler_is_left_alone(experiment: Experiment) -> None:
    run, _ = opening(experiment)
    status = read_status(run.status)
    assert status is not None
    write_status(run.status, replace(status, submission="quantexp-1", job_id="12_3"))
    before = contents(run.root)
    with open_run(
        experiment, "cpu", [], lambda _, status: f"job {status.job_id} is waiting"
    ) as opened:
        assert opened[0].elsewhere == "job 12_3 is waiting"
    assert contents(run.root) == before
    with open_run(experiment, "cpu", [], lambda *_: None) as opened:
        assert opened[0].elsewhere is None, "the job is gone: a new attempt is ready"


HELD_BY_A_JOB = """\
import sys
from pathlib import Path
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
take_lock(RunDir(Path(sys.argv[1])))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def running_elsewhere(experiment: Experiment) -> Iterator[RunDir]:
    """A folder in which a job runs that has the lock."""
    run, _ = opening(experiment)
    status = read_status(run.status)
    assert status is not None
    running = replace(status, state=State.RUNNING, submission="quantexp-1", job_id="12_3")
    write_status(run.status, running)
    holder = subprocess.Popen(
        [sys.executable, "-c", HELD_BY_A_JOB, str(run.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield run
        assert holder.stdin is not None
        holder.stdin.close()


def test_run_in_a_running_job_is_reported_at_once_and_left_alone(
    experiment: Experiment, running_elsewhere: RunDir
) -> None:
    before = contents(running_elsewhere.root)
    start = time.monotonic()
    answer = "job 12_3 is running on n1"
    with open_run(experiment, "cpu", [], lambda *_: answer, patience_s=300) as (folder, lock):
        assert (folder.elsewhere, folder.skipped, lock) == (answer, None, None)
        assert folder.snapshot.is_dir()
    assert time.monotonic() - start < 60
    assert contents(running_elsewhere.root) == before


def test_lock_of_a_vanished_job_is_an_error_after_the_patience(
    experiment: Experiment, running_elsewhere: RunDir
) -> None:
    with (
        pytest.raises(RunInUseError, match=r"is in use by another process; wait for it, or stop"),
        open_run(experiment, "cpu", [], lambda *_: None, patience_s=0.5),
    ):
        pass


def test_attempt_cancelled_before_its_start_is_no_attempt(
    experiment: Experiment,
) -> None:
    run, _ = opening(experiment)
    status = read_status(run.status)
    assert status is not None
    write_status(run.status, replace(status, state=State.CANCELLED, reason="not submitted"))
    opening(experiment)
    assert not run.attempts.exists()


def test_kept_files_are_copied_into_the_attempt_and_are_never_missing(
    experiment: Experiment,
) -> None:
    run, _ = opening(experiment)
    begin(run)
    before = contents(run.root)
    set_aside(run, None, keep=(run.config, run.status))
    assert contents(run.attempts / "1") == before
    assert run.config.read_bytes() == before["config.yaml"]
    assert run.status.read_bytes() == before["status.json"]
    assert not run.provenance.exists()


def test_paths_of_the_saved_configuration_are_absolute(
    experiment: Experiment, in_tmp: Path
) -> None:
    experiment.paths.root, experiment.capture.dir = "runs", "big"
    run, _ = opening(experiment)
    saved = read(run.config)
    assert saved.paths.root == str(in_tmp / "runs")
    assert saved.capture.dir == str(in_tmp / "big")


# Attempts of other processes that share a sweep.

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


def test_folder_is_determined_without_opening_it(experiment: Experiment) -> None:
    run = run_folder(experiment, "cpu")
    assert not run.root.exists()
    assert opening(experiment)[0] == run


def test_known_source_is_not_determined_again(experiment: Experiment) -> None:
    with open_run(experiment, "cpu", [], source={"commit": "0123", "diff": None}) as (folder, _):
        source = json.loads(folder.run.provenance.read_text())["source"]
        assert source == {"commit": "0123", "diff": None, "snapshot": folder.snapshot.name}
