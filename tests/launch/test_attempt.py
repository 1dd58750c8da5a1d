"""Opening a run folder: attempts, the lock, provenance."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quantexp import __version__
from quantexp.config.load import read
from quantexp.errors import RunError, RunInUseError
from quantexp.launch import attempt
from quantexp.launch.attempt import open_run, run_folder, set_aside
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.runs.status import (
    State,
    read_status,
    write_status,
)
from quantexp.schema import CaptureLevel, Experiment

from .attempts import complete, contents, opening


def begin(run: RunDir) -> None:
    """Leave the folder as a started run does."""
    status = read_status(run.status)
    assert status is not None
    write_status(run.status, replace(status, state=State.CANCELLED, started="2026-01-01"))


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
    snapshots = RunsRoot(run.root.parent).snapshots
    shutil.rmtree(snapshots)
    with open_run(experiment, "cpu", []) as (folder, lock):
        assert (folder.ready, lock) == (False, None)
        assert (folder.skipped or "").startswith("already completed")
    assert not snapshots.exists(), "the folder of runs may be one that this user cannot write"
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


def test_folder_is_determined_without_opening_it(experiment: Experiment) -> None:
    run = run_folder(experiment, "cpu")
    assert not run.root.exists()
    assert opening(experiment)[0] == run


def test_known_source_is_not_determined_again(experiment: Experiment) -> None:
    with open_run(experiment, "cpu", [], source={"commit": "0123", "diff": None}) as (folder, _):
        source = json.loads(folder.run.provenance.read_text())["source"]
        assert source == {"commit": "0123", "diff": None, "snapshot": folder.snapshot.name}
