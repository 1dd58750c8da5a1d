"""Captured tensors are scored and drawn by tasks of a real SLURM: the result of one process, whatever ends a task."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from quantexp.cli.main import main
from tests.extras.requantise.conftest import linear, write_capture

from .cluster import Cluster
from .launched import SMALL, until

Captured = pytest.CaptureFixture[str]
#: Two tasks of 18 tensors.
LAYERS = 12
#: Scores that take about a second for each tensor; a figure of a tensor takes about as long.
SCORING = ["requantise", "run", "--formats", "mxfp4,mxfp8"]
DRAWING = ["draw", "run", "--formats", "png"]


@pytest.fixture
def capture(in_tmp: Path) -> Path:
    """36 tensors of a run."""
    tensors = {place: x for layer in range(LAYERS) for place, x in linear(layer).items()}
    return write_capture(in_tmp / "run" / "tensors", tensors)


def submitted(words: list[str], capsys: Captured) -> tuple[str, list[str]]:
    """The submission's name and the ids of its jobs: of the array, if there is one, and of the last job."""
    assert main([*words, *SMALL]) == 0
    output = capsys.readouterr().out.splitlines()
    name = next(line.rpartition("=")[2] for line in output if line.startswith("stop"))
    rows = [line for line in output if line.startswith("submitted")]
    ids = [row.partition("array " if "array" in row else "job ")[2].split(",")[0] for row in rows]
    return name, ids


def tasks(name: str) -> Iterator[psutil.Process]:
    """The Python processes of the tasks of a submission's array."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_task = words[-2:-1] == ["make"] and name in words[-1] and "python" in words[0]
            if is_task and "SLURM_PROCID" in process.environ():
                yield process


def partial(out: str, end: str) -> list[Path]:
    return sorted(Path(f"{out}.partial").glob(f"*/*{end}"))


def files(out: str) -> dict[str, bytes]:
    """The tables and JSON of an output folder, as bytes."""
    kinds = (".csv", ".json", ".txt", ".yaml")
    found = (path for path in Path(out).rglob("*") if path.suffix in kinds)
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in found
        if not path.name.startswith(".")
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("words", "end"),
    [(SCORING, ".npz"), (DRAWING, ".drawn.json")],
    ids=["requantise", "draw"],
)
def test_killed_task_goes_on_when_the_same_command_is_repeated(
    plain: Cluster, capture: Path, capsys: Captured, words: list[str], end: str
) -> None:
    own = [*words, "--out", "own"]
    name, (array, last) = submitted(own, capsys)
    first = until("a partial result", lambda: partial("own", end), 300)[0]
    written = first.stat().st_mtime_ns
    for process in list(tasks(name)):
        with contextlib.suppress(psutil.Error):
            os.kill(process.pid, signal.SIGKILL)
    until("the end of all jobs", lambda: not plain.squeue(f"--name={name}"), 300)
    assert "FAILED" in plain.states(array).values()
    assert plain.states(last) == {last: "CANCELLED"}, "its dependency cannot be satisfied"
    assert main([*own, *SMALL]) == 0
    output = capsys.readouterr().out
    assert f"{name} (the jobs before)" in " ".join(output.split())
    assert "(did not finish)" in output
    held = os.open(first, os.O_RDONLY)  # the last job removes its name
    again = next(line.rpartition("=")[2] for line in output.splitlines() if line.startswith("stop"))
    until("the end of all jobs", lambda: not plain.squeue(f"--name={again}"), 600)
    assert os.fstat(held).st_mtime_ns == written, "it was not made again"
    os.close(held)
    assert not Path("own.partial").exists()
    assert main([*words, "--out", "alone"]) == 0
    expected = files("alone")
    assert expected
    assert files("own") == expected
