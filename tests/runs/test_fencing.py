"""Only the newest of several starts of a job writes into the run's folder."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from quantexp.errors import RunError, RunInUseError
from quantexp.runs.fencing import (
    START,
    Claim,
    TakenOverError,
    claimant,
    claimed,
    drop_claim,
    drop_dead_claim,
    is_ours,
    own_claim,
    own_start,
    read_claim,
    require_ours,
    take_over,
)
from quantexp.runs.paths import RunDir


def be(monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    """Make this a process of that start."""
    monkeypatch.setenv("QUANTEXP_START", start)


def test_process_without_numbered_starts_may_always_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("QUANTEXP_START", raising=False)
    assert own_start() == ""
    require_ours(RunDir(tmp_path))


def test_later_start_takes_the_folder_from_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    be(monkeypatch, "7 0")
    assert not is_ours(run), "nobody's yet"
    take_over(run)
    require_ours(run)
    be(monkeypatch, "7 1")
    assert not is_ours(run)
    take_over(run)
    require_ours(run)
    be(monkeypatch, "7 0")
    with pytest.raises(TakenOverError):
        require_ours(run)


def test_start_of_another_job_is_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    be(monkeypatch, "7 1")
    take_over(run)
    be(monkeypatch, "8 1")
    assert not is_ours(run)


def test_handler_of_errors_does_not_catch_the_end_of_a_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    be(monkeypatch, "7 0")
    assert not issubclass(TakenOverError, Exception)
    with pytest.raises(TakenOverError):
        require_ours(RunDir(tmp_path))


FAR = Claim("0123", "far", 7, "12", "another boot", "another installation")
#: Claims a folder as its machine's process, and waits.
HOLDS = """
import sys
from pathlib import Path
from quantexp.runs.fencing import claimed
from quantexp.runs.paths import RunDir
with claimed(RunDir(Path(sys.argv[1]))):
    print("claimed", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def put(run: RunDir, claim: Claim) -> None:
    run.claim.write_text(json.dumps(asdict(claim)))


@pytest.mark.parametrize(("job", "words"), [("12", r" \(SLURM job 12\)"), ("", "")])
def test_claim_of_another_machine_is_refused_with_host_process_and_job(
    run: RunDir, job: str, words: str
) -> None:
    put(run, replace(FAR, job=job))
    message = (
        rf"{re.escape(str(run.root))} is in use by process 7 on far{words}; wait for it, or stop it there\. "
        rf"If that process is gone, delete {re.escape(str(run.claim))}$"
    )
    with pytest.raises(RunInUseError, match=message), claimed(run):
        pass
    assert read_claim(run) == replace(FAR, job=job), "it is still the other's"
    assert claimant(run) == replace(FAR, job=job)


def test_claim_ends_with_its_context(run: RunDir) -> None:
    with claimed(run) as name:
        claim = read_claim(run)
        assert claim is not None
        assert (claim.name, claim.pid, claim.host) == (name, os.getpid(), os.uname().nodename)
    assert not run.claim.exists()
    with pytest.raises(ZeroDivisionError), claimed(run):
        raise ZeroDivisionError
    assert not run.claim.exists()


def test_claim_names_its_job(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with claimed(run):
        assert str(read_claim(run)).endswith("(SLURM job 4711)")


def test_claim_of_a_killed_process_of_this_machine_delays_no_other(run: RunDir) -> None:
    words = [sys.executable, "-c", HOLDS, str(run.root)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"claimed\n"
        process.send_signal(signal.SIGKILL)
    assert run.claim.exists()
    assert claimant(run) is None
    with claimed(run) as name:
        claim = read_claim(run)
        assert claim is not None
        assert (claim.name, claim.pid) == (name, os.getpid())


@pytest.mark.parametrize(
    ("boot", "machine", "host", "same"),
    [
        ("another boot", "here", "host", True),
        ("this boot", "", "container", True),
        ("another boot", "", "host", False),
        ("another boot", "here", "clone", False),
    ],
)
def test_machine_is_the_same_after_a_boot_and_another_if_only_the_name_is_equal(
    boot: str, machine: str, host: str, same: bool
) -> None:
    here = Claim("1", "host", 1, "", "this boot", "here")
    assert Claim("2", host, 2, "", boot, machine).is_of(here) is same


def test_claimant_alone_may_write(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with claimed(run) as name:
        monkeypatch.setenv(START, name)
        assert is_ours(run)
        run.claim.unlink()  # its user believes it dead
        with claimed(run) as other:
            assert not is_ours(run)
            monkeypatch.setenv(START, other)
            assert is_ours(run)
    assert not run.claim.exists()


def test_end_of_a_claimant_leaves_the_claim_of_the_next(run: RunDir) -> None:
    with claimed(run):
        put(run, FAR)
    assert read_claim(run) == FAR
    drop_dead_claim(run)
    assert read_claim(run) == FAR
    put(run, replace(own_claim(), name="dead"))
    drop_dead_claim(run)
    assert not run.claim.exists()


def test_claim_that_cannot_be_read_is_another_machine_s(run: RunDir) -> None:
    run.claim.write_text("{")
    with (
        pytest.raises(RunInUseError, match="is in use by a process on another machine; wait for"),
        claimed(run),
    ):
        pass
    drop_claim(run, "")
    drop_dead_claim(run)
    assert run.claim.read_text() == "{"


def test_folder_that_cannot_be_written_keeps_no_claim(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantexp.runs.fencing.take_over", full)
    with pytest.raises(RunError, match="cannot be written: No space left on device"), claimed(run):
        pass
    assert not run.claim.exists()


def test_claim_of_another_machine_outlives_an_error_of_the_file_server(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(run, FAR)
    opened = Path.open

    def fails(path: Path, mode: str = "r", **keywords: Any) -> Any:
        if mode == "x":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, mode, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        with pytest.raises(RunError, match="cannot be written: "), claimed(run):
            pass
    assert read_claim(run) == FAR


def test_deleted_folder_does_not_come_back(run: RunDir, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    with claimed(run):
        run.root.rename(tmp_path / "elsewhere")
    assert not run.root.exists()
