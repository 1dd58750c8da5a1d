"""Whole runs in processes of their own, whose trackers never answer, refuse, or have a part of the run already."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status

from .conftest import SECRETS
from .servers import absent, silent
from .test_wandb import items, messages_of

REMOTE = ["tracking.wandb.enabled=true", "tracking.mlflow.enabled=true", "capture=off"]
#: A run, with less patience for trackers; killed after an iteration as soon as all trackers have that.
RUN = """\
import os, signal, sys, time
from quantexp.config.compose import compose
from quantexp.launch.attempt import open_run
from quantexp.training.observer import RunObserver
from quantexp.training.tracking import clients, wandb
from quantexp.training.worker import Worker, leave_process
patience_s, killed_after, *words = sys.argv[1:]
clients.PATIENCE_S, wandb.INIT_S = float(patience_s), 2.0
original = RunObserver.iteration
def iteration(self, metrics):
    goes_on = original(self, metrics)
    while metrics.iteration == int(killed_after):
        time.sleep(0.1)
        self.context.write_status()
        if all(each["iteration"] == metrics.iteration for each in self.context.status.tracking.values()):
            os.kill(os.getpid(), signal.SIGKILL)
    return goes_on
RunObserver.iteration = iteration
with open_run(compose(words), "cpu", ["test"]) as (folder, _):
    code = Worker(folder.run, compose(words)).run()
leave_process(code)
"""

Run = Callable[..., tuple[RunDir, Status, subprocess.CompletedProcess[str]]]


@pytest.fixture
def run(tiny_words: list[str], tmp_path: Path) -> Run:
    """Run a tiny experiment; its folder and status, and its process."""

    def start(
        *words: str, patience_s: float = 120, killed_after: int = 0
    ) -> tuple[RunDir, Status, subprocess.CompletedProcess[str]]:
        words = (*tiny_words, f"paths.root={tmp_path / 'runs'}", *REMOTE, *words)
        command = [sys.executable, "-c", RUN, str(patience_s), str(killed_after), *words]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        (folder,) = (tmp_path / "runs").glob("llama*")
        status = read_status(RunDir(folder).status)
        assert status is not None
        return RunDir(folder), status, process

    return start


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["silent", "absent"])
def test_servers_that_do_not_answer_neither_end_nor_delay_a_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["WANDB_API_KEY"])
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with silent() as server:
        address = server if kind == "silent" else absent()
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        folder, status, process = run("training.iterations=30", patience_s=1)
    assert process.returncode == 0, process.stderr
    assert (status.state, status.iteration) == (State.COMPLETED, 30)
    assert status.tracking["tensorboard"]["ended"]
    for name in ("wandb", "mlflow"):
        record = status.tracking[name]
        assert record["trouble"]
        assert (record["iteration"], record["ended"]) == (0, False)
        assert process.stderr.count(f"WARNING rank 0: tracking.{name}: ") == 1
    assert SECRETS["WANDB_API_KEY"] not in process.stderr
    # The servers would block it for ever, or for the clients' minutes; this is ample even on a busy machine.
    assert status.finished is not None
    last = json.loads(folder.metrics.read_text().splitlines()[-1])
    finished = datetime.fromisoformat(status.finished)
    assert (finished - datetime.fromisoformat(last["time"])).total_seconds() < 60
    assert time.time() - finished.timestamp() < 60


@pytest.mark.slow
def test_processes_of_wandb_end_with_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its server does not answer and the run has not waited for it."""
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["WANDB_API_KEY"])
    with silent() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server)
        run("tracking.mlflow.enabled=false", "training.iterations=4", patience_s=1)
        until = time.monotonic() + 120
        while left := [each for each in processes_here() if "wandb" in each.name()]:
            assert time.monotonic() < until, left
            time.sleep(0.2)


def processes_here() -> list[psutil.Process]:
    """Running processes that this test has started, by the mark in their environment."""
    found = []
    for process in psutil.process_iter(["environ", "status"]):
        environment = process.info["environ"] or {}
        is_here = environment.get("QUANTEXP_TEST") == os.environ["QUANTEXP_TEST"]
        if is_here and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return [each for each in found if each.pid != os.getpid()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_that_was_killed_and_goes_on_is_one_run_with_each_iteration_once(run: Run) -> None:
    words = ["tracking.wandb.mode=offline", "training.iterations=6"]
    words += ["checkpoint.every=2", "checkpoint.optimizer=true"]
    _, killed, process = run(*words, killed_after=3)
    assert process.returncode == -9, process.stderr
    folder, status, process = run(*words)
    assert process.returncode == 0, process.stderr
    assert status.goes_on_from == 2
    for name in ("wandb", "mlflow"):
        assert status.tracking[name]["id"] == killed.tracking[name]["id"]
        assert (status.tracking[name]["iteration"], status.tracking[name]["ended"]) == (6, True)
    with closing(sqlite3.connect(folder.root.parent / "mlflow.db")) as database:
        (ended,) = database.execute("select status from runs")
        steps = database.execute("select step from metrics where key = 'train/loss' order by step")
        assert (ended, [step for (step,) in steps]) == (("FINISHED",), [1, 2, 3, 4, 5, 6])
    last = max(
        folder.wandb.glob("offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime
    )
    rows = [items(m.history) for m in messages_of(last) if m.WhichOneof("record_type") == "history"]
    assert [row["_step"] for row in rows] == [4, 5, 6]
