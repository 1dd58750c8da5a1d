"""Runs in the background: they outlive the command and its terminal, end on a signal, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from quantexp_launchers.local import submit
from quantexp_launchers.local import sweep as module
from quantexp_launchers.local.submit import go_on_in_background
from quantexp_launchers.local.sweep import Sweep, prepare
from rich.console import Console

from quantexp.errors import RunError
from quantexp.runs.lock import is_held, is_locked
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_json, read_status
from quantexp.schema import Experiment

from .stand_in import output_of

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("worker.py")
#: On the PYTHONPATH of every Python started here: it replaces the worker by the stand-in.
CUSTOM = f"""\
import sys
from quantexp_launchers.local import processes

processes.command = lambda run_dir, _=1: [sys.executable, "-S", {str(WORKER)!r}, str(run_dir)]
"""

Detach = Callable[..., tuple[Sweep, psutil.Process]]


@pytest.fixture
def detach(
    make: Callable[..., Experiment],
    console: Console,
    in_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Detach]:
    """Starts a sweep of `num_runs` runs in the background; kills what a failing test leaves running."""
    (in_tmp / "custom").mkdir()
    (in_tmp / "custom" / "sitecustomize.py").write_text(CUSTOM)
    path = [str(in_tmp / "custom"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(module, "device_class", lambda _: "cpu")
    processes: list[psutil.Process] = []

    def start(num_runs: int, seconds: float = 0.1) -> tuple[Sweep, psutil.Process]:
        monkeypatch.setenv("STAND_IN_SECONDS", str(seconds))
        sweep = prepare([(make(seed), 0) for seed in range(num_runs)], console)
        go_on_in_background(sweep, console)
        line = re.search(r"in the background, process (\d+)", output_of(console))
        assert line is not None
        processes.append(psutil.Process(int(line[1])))
        return sweep, processes[-1]

    yield start
    for process in processes:
        if process.is_running():
            process.kill()


def status_of(sweep: Sweep, index: int = 0) -> Status:
    run = sweep.items[index].run
    assert run is not None
    status = read_status(run.status)
    assert status is not None
    return status


def run_of(sweep: Sweep, index: int = 0) -> RunDir:
    run = sweep.items[index].run
    assert run is not None
    return run


def wait_until(
    is_true: Callable[[], Any], details: Callable[[], Any] = lambda: None, within_s: float = 240
) -> None:
    end = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < end, details()
        time.sleep(0.02)


def left(root: Path) -> list[psutil.Process]:
    """Processes that have the folder of the runs on their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(root) in word for word in process.info["cmdline"] or [])
    ]


def test_sweep_goes_on_by_itself_and_prints_how_to_follow_it(
    detach: Detach, console: Console, in_tmp: Path
) -> None:
    sweep, process = detach(2)
    assert os.getsid(process.pid) == process.pid, "no terminal's end reaches it"
    assert process.terminal() is None
    process.send_signal(signal.SIGHUP)
    assert is_held(sweep.files.lock)
    wait_until(lambda: read_json(sweep.files.listing)["finished"])
    assert [row["state"] for row in read_json(sweep.files.listing)["runs"]] == ["completed"] * 2
    name, listing = run_of(sweep).root.name, sweep.files.listing.relative_to(in_tmp)
    assert output_of(console).splitlines() == [
        f"2 runs continue in the background, process {process.pid}",
        "runs    runs",
        f"follow  quantexp status {listing}",
        f"        quantexp logs runs/{name} -f",
        f"stop    quantexp cancel {listing}",
        f"log     {sweep.files.log.relative_to(in_tmp)}",
    ]
    wait_until(lambda: not left(sweep.root))
    log = sweep.files.log.read_text()
    assert "completed  bf16 seed=1" in log
    assert "2 runs" in log


def test_one_run_goes_on_from_the_source_snapshot_and_is_followed_in_its_own_folder(
    detach: Detach, console: Console
) -> None:
    sweep, process = detach(1, 60)
    name = run_of(sweep).root.name
    first, *lines = output_of(console).splitlines()
    assert first.startswith("1 run continues in the background, process ")
    assert lines[:2] == [f"runs    runs/{name}", f"follow  quantexp status runs/{name}"]
    wait_until(lambda: status_of(sweep).state is State.RUNNING)
    source = Path(process.environ()["PYTHONPATH"].split(os.pathsep)[0])
    assert source.parent == sweep.root / "snapshots"
    commit = read_json(run_of(sweep).provenance)["source"]
    assert commit == {**sweep.source, "snapshot": source.name}
    process.terminate()
    wait_until(lambda: not left(sweep.root))


def test_signal_cancels_the_running_run_and_leaves_the_waiting_one(detach: Detach) -> None:
    sweep, process = detach(2, 60)
    wait_until(lambda: status_of(sweep).state is State.RUNNING)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: not left(sweep.root))
    assert (status_of(sweep).state, status_of(sweep).reason) == (State.CANCELLED, "interrupted")
    waiting = status_of(sweep, 1)
    assert waiting.state is State.PENDING
    assert waiting.reason == "its sweep was interrupted before it started"


def test_run_of_a_killed_background_process_ends_with_it(detach: Detach) -> None:
    sweep, process = detach(2, 60)
    wait_until(lambda: status_of(sweep).state is State.RUNNING)
    process.kill()
    wait_until(lambda: not left(sweep.root))
    assert status_of(sweep).state is State.CANCELLED
    assert status_of(sweep, 1).state is State.PENDING
    wait_until(lambda: not is_locked(run_of(sweep)))
    assert not is_held(sweep.files.lock)


def test_background_process_that_does_not_start_gives_the_reason(
    detach: Detach, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(sweep: Sweep) -> None:
        sweep.files.listing.parent.mkdir(parents=True)
        sweep.files.listing.write_text("{")

    monkeypatch.setattr(Sweep, "write", broken)
    with pytest.raises(
        RunError,
        match=r"(?s)the background process did not start; the end of .*\.log:\nquantexp: .*"
        r"\.json is not a sweep of this version: line 1: ",
    ):
        detach(1)
    (run,) = (in_tmp / "runs").glob("llama*")
    status = read_status(RunDir(run).status)
    assert status is not None
    assert status.state is State.PENDING
    assert status.reason == "the background process did not start"


def test_interrupt_during_its_start_ends_the_background_process(
    detach: Detach, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(submit, "is_held", interrupted)
        with pytest.raises(KeyboardInterrupt):
            detach(1, 60)
    wait_until(lambda: not left(in_tmp), lambda: left(in_tmp))
