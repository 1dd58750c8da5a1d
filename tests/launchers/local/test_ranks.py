"""Ranks that are killed, hang or are interrupted: their run has its true state, and no process stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from quantexp_launchers.local import processes

from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import read_record
from quantexp.runs.status import State, Status, read_status


class Started:
    """`quantexp` with two processes, in a process of its own that a test can interrupt."""

    def __init__(self, words: list[str], root: Path) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quantexp", *words, f"paths.root={root}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    @property
    def run(self) -> RunDir:
        (folder,) = self.root.glob("llama*")
        return RunDir(folder)

    @property
    def status(self) -> Status:
        status = read_status(self.run.status)
        assert status is not None
        return status

    def wait_until_it_trains(self) -> None:
        end = time.monotonic() + 240
        while not list(self.root.glob("llama*/metrics.jsonl")):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.1)

    def rank_pid(self, rank: int) -> int:
        record = read_record(self.run, rank)
        assert record is not None
        return record.pid

    def end(self, within_s: float) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=within_s)
        return self.process.returncode, errors

    def left(self) -> list[psutil.Process]:
        """Every process that has the run's folder on its command line."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "pid"])
            if any(str(self.root) in word for word in process.info["cmdline"] or [])
        ]


@pytest.fixture
def started(tiny_words: list[str], tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts a long run of two processes and waits until it trains; kills what a failing test leaves running."""
    runs: list[Started] = []

    def start(*words: str) -> Started:
        long = ["training.micro_batch_size=1", "training.iterations=100000", "capture=off"]
        runs.append(
            Started([*tiny_words, *long, "launcher.num_processes=2", *words], tmp_path / "runs")
        )
        runs[-1].wait_until_it_trains()
        return runs[-1]

    yield start
    for run in runs:
        for process in run.left():
            process.kill()
        run.process.communicate()


@pytest.mark.slow
def test_killed_rank_fails_the_run_and_is_named(started: Callable[..., Started]) -> None:
    run = started()
    os.kill(run.rank_pid(1), signal.SIGKILL)
    code, errors = run.end(within_s=200)
    assert code == 1
    assert run.status.state is State.FAILED
    assert run.status.finished is not None
    assert run.status.reason.startswith("rank 1 did not end by itself (killed, out of memory, ")
    assert f"; see {run.run.rank_log(1)}" in run.status.reason.splitlines()[0]
    assert "rank 1 did not end by itself" in errors
    assert not run.left()


@pytest.mark.slow
def test_killed_rank_0_cannot_keep_the_run_running(started: Callable[..., Started]) -> None:
    run = started()
    os.kill(run.rank_pid(0), signal.SIGKILL)
    code, _ = run.end(within_s=200)
    assert code == 1
    assert run.status.state is State.FAILED
    assert run.status.reason.startswith("rank 0 did not end by itself")
    assert not run.left()


@pytest.mark.slow
def test_hanging_rank_fails_the_run_within_the_timeout_and_is_named(
    started: Callable[..., Started],
) -> None:
    """After 12 s without progress, or once the other rank gives up, without torchrun's 30 s of grace."""
    run = started("launcher.timeout_min=0.2")
    os.kill(run.rank_pid(1), signal.SIGSTOP)
    code, errors = run.end(within_s=12 + 30 + 30)
    assert code == 1
    assert run.status.state is State.FAILED
    first, *others = run.status.reason.splitlines()
    assert first.startswith("rank 1: no progress for "), run.status.reason
    # Rank 0 waits for rank 1 as long, and may record its own end first.
    place = r"\(launcher\.timeout_min=0\.2\) (at|after) iteration \d+"
    assert re.search(rf"{place}.*; the process was stopped by a signal \(state T\)", first), first
    assert len(others) <= 1
    assert first in errors
    assert not run.left()


@pytest.mark.slow
def test_rank_that_a_signal_ends_is_named(started: Callable[..., Started]) -> None:
    run = started()
    os.kill(run.rank_pid(1), signal.SIGTERM)
    code, errors = run.end(within_s=200)
    assert code == 130
    assert (run.status.state, run.status.reason) == (
        State.CANCELLED,
        "rank 1 was ended by SIGTERM",
    )
    assert "cancelled: rank 1 was ended by SIGTERM" in errors
    assert not run.left()


@pytest.mark.slow
def test_interrupt_ends_every_rank_as_cancelled(started: Callable[..., Started]) -> None:
    run = started()
    run.process.send_signal(signal.SIGINT)
    code, errors = run.end(within_s=200)
    assert code == 130
    assert "cancelled: interrupted" in errors
    assert (run.status.state, run.status.reason) == (State.CANCELLED, "interrupted")
    assert not run.left()


@pytest.mark.slow
def test_second_interrupt_gives_a_hanging_rank_no_more_time(
    started: Callable[..., Started],
) -> None:
    run = started()
    os.kill(run.rank_pid(1), signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    code, _ = run.end(within_s=processes.GRACE_S / 2)
    assert code == 130
    assert run.status.state is State.CANCELLED
    assert not run.left()


@pytest.mark.slow
def test_killed_torchrun_leaves_no_rank(started: Callable[..., Started]) -> None:
    run = started()
    torchrun = psutil.Process(run.rank_pid(0)).parent()
    assert torchrun is not None
    torchrun.kill()
    code, _ = run.end(within_s=200)
    assert code == 1
    assert run.status.state is State.FAILED
    assert not run.left()


@pytest.mark.slow
@pytest.mark.parametrize("also_torchrun", [False, True])
def test_killed_quantexp_leaves_nothing(
    started: Callable[..., Started], also_torchrun: bool
) -> None:
    run = started()
    rank = psutil.Process(run.rank_pid(0))
    torchrun = rank.parent()
    assert torchrun is not None
    run.process.kill()
    if also_torchrun:
        torchrun.kill()
    run.end(within_s=10)
    psutil.wait_procs([torchrun, rank], 60)
    assert not run.left()
    assert run.status.state is State.PREEMPTED
    assert run.status.reason == (
        f"its quantexp command, process {run.process.pid}, ended without ending it (killed?)"
    )
    os.close(take_lock(run.run, patience_s=10))
    assert not run.run.claim.exists(), "other machines may go on with it"


@pytest.mark.slow
def test_ranks_listen_on_the_loopback_address_alone(started: Callable[..., Started]) -> None:
    listening = {
        connection.laddr.ip
        for process in started().left()
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
