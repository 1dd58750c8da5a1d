"""Claims between machines that do not see each other's locks, on a real disk."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from quantexp.errors import RunInUseError, UnreadableError
from quantexp.runs import claim as module
from quantexp.runs.claim import (
    LEASE_S,
    Disk,
    Machine,
    inherited_claim,
    is_claimed,
    take_claim,
    this_machine,
)
from quantexp.runs.fencing import CLAIM, is_ours
from quantexp.runs.paths import RunDir

FAR = Machine("another boot", "another installation", "far")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_claim_of_another_machine_counts_until_it_is_over(run: RunDir) -> None:
    claim = take_claim(run, FAR)
    assert is_claimed(run)
    with pytest.raises(
        RunInUseError,
        match=rf"is in use by process {os.getpid()} on far; wait for it, or stop it there\. If that machine is off, "
        "wait 3 minutes",
    ):
        take_claim(run)
    claim.end()
    assert not is_claimed(run)
    assert take_claim(run).is_valid()
    assert not claim.is_valid()


def test_claim_that_nobody_touches_ends_with_its_lease(run: RunDir) -> None:
    claim = take_claim(run, FAR)
    long_ago = time.time() - LEASE_S - 5
    os.utime(claim.disk.file(1), (long_ago, long_ago))
    assert not is_claimed(run)
    take_claim(run)


def test_dead_claim_of_this_machine_delays_no_process(run: RunDir) -> None:
    """Its lock was free, or the caller would not have come this far."""
    take_claim(run)
    here = this_machine()
    take_claim(run, Machine("the boot before", here.id, here.host))
    assert not is_claimed(run)
    assert take_claim(run).is_valid()


def test_one_of_two_claimants_of_a_number_gets_it(run: RunDir) -> None:
    take_claim(run, FAR).end()

    class OldList(Disk):
        def numbers(self) -> list[int]:
            return []

    with pytest.raises(RunInUseError, match="was just taken by another process; wait for it"):
        take_claim(run, disk=OldList(run))


def test_process_continues_its_parent_s_claim_even_after_a_gap(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = take_claim(run)
    monkeypatch.setenv(CLAIM, claim.token)
    assert is_ours(run)
    worker = inherited_claim(run, claim.token)
    monkeypatch.setattr(module, "SAFE_S", -1.0)
    assert worker.is_valid()
    assert claim.is_valid(), "the next number is the same claimant's"
    assert claim.disk.numbers() == [1, 2, 3, 4], "a worker does not know when its parent checked"
    monkeypatch.setattr(module, "SAFE_S", 90.0)
    claim.end()
    take_claim(run, FAR)
    assert not worker.is_valid()
    assert not is_ours(run)


def test_claim_is_over_when_its_context_ends(run: RunDir) -> None:
    claim = take_claim(run, FAR)
    with claim.touching():
        assert is_claimed(run)
    assert not is_claimed(run)


def test_claim_stays_valid_while_the_disk_fails_for_a_moment(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = take_claim(run)

    def fail(file: Path, most: int) -> str:
        error = OSError(errno.EIO, "Input/output error")
        raise UnreadableError(f"{file} cannot be read") from error

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_text", fail)
        assert claim.is_valid()
        patch.setattr(module, "SAFE_S", -1.0)
        with pytest.raises(OSError, match="Input/output error"):
            claim.is_valid()
    assert claim.is_valid()


def test_claim_that_cannot_be_read_is_another_machine_s(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_claim(run)

    def fail(file: Path, most: int) -> str:
        error = PermissionError(errno.EACCES, "Permission denied")
        raise UnreadableError(f"{file} cannot be read") from error

    monkeypatch.setattr(module, "read_text", fail)
    with pytest.raises(RunInUseError, match="in use by a process on another machine"):
        take_claim(run)
