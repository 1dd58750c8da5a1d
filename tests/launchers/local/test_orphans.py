"""An interrupted sweep of several simultaneous runs with several ranks each leaves no process.

The same for killed ones is in test_detach (workers) and test_processes (torchrun and its ranks).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from quantexp.runs.status import State, Status, read_status

WORDS = ["quant=bf16,FA_mxfp8,linear_mxfp8", "training.micro_batch_size=1", "capture=off"]
WORDS += ["training.iterations=100000", "launcher.num_processes=2", "launcher.max_parallel=2"]

Sweep = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def sweep(tiny_words: list[str], root: Path) -> Iterator[Sweep]:
    """Starts three long runs of two ranks each, two at a time, and waits until both train."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        words = [*tiny_words, *WORDS, f"paths.root={root}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "quantexp", "-m", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        started.append(process)
        end = time.monotonic() + 200
        while len(list(root.glob("llama*/metrics.jsonl"))) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.1)
        return process

    yield start
    for process in left(root):
        process.kill()
    for popen in started:
        popen.communicate()


def left(root: Path) -> list[psutil.Process]:
    """Processes that have the folder of the runs on their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(root) in word for word in process.info["cmdline"] or [])
    ]


def statuses(root: Path) -> list[Status]:
    contents = [read_status(file) for file in sorted(root.glob("llama*/status.json"))]
    return [status for status in contents if status is not None]


@pytest.mark.slow
def test_interrupt_ends_every_rank_of_every_run(sweep: Sweep, root: Path) -> None:
    process = sweep()
    workers = [p for p in left(root) if "quantexp.training.worker" in p.cmdline() and p.ppid() != 1]
    assert len([p for p in workers if "torch.distributed.run" not in p.cmdline()]) == 4
    cores = {tuple(p.cpu_affinity()) for p in workers}
    assert len(cores) == 2, "each run has cores of its own"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 130
    assert errors == "quantexp: interrupted\n"
    assert "1 pending: its sweep was interrupted before it started" in output
    assert not left(root)
    states = sorted(status.state for status in statuses(root))
    assert states == [State.CANCELLED, State.CANCELLED, State.PENDING]
