"""`draw` and `requantise` as a job of a real SLURM: the result of the command here, also after the job is killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from quantexp.cli.main import main
from tests.extras.requantise.conftest import linear, write_capture

from .cluster import Cluster
from .launched import SMALL, until

Captured = pytest.CaptureFixture[str]
#: Tensors of which the scores, or the figures, take about a second each.
LAYERS = 4
SCORING = ["requantise", "run", "--formats", "mxfp4,mxfp8"]
DRAWING = ["draw", "run", "--formats", "png"]


@pytest.fixture
def capture(in_tmp: Path) -> Path:
    """12 tensors of a run."""
    tensors = {place: x for layer in range(LAYERS) for place, x in linear(layer).items()}
    return write_capture(in_tmp / "run" / "tensors", tensors)


def submitted(words: list[str], capsys: Captured) -> tuple[str, str, str]:
    """The submission's name, the id of its job, and all that is printed."""
    assert main([*words, *SMALL]) == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    name = next(line.rpartition("=")[2] for line in lines if line.startswith("stop"))
    (row,) = (line for line in lines if line.startswith("submitted"))
    return name, row.rpartition(" ")[2], output


def commands(partial: Path) -> Iterator[psutil.Process]:
    """The Python process of the job that works for this record."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(partial) in process.cmdline() and "python" in process.cmdline()[0]:
                yield process


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
    ("words", "begun"),
    [(SCORING, "requantise.csv*"), (DRAWING, "measures.jsonl")],
    ids=["requantise", "draw"],
)
def test_killed_job_is_repeated_by_the_same_command(
    plain: Cluster, capture: Path, capsys: Captured, words: list[str], begun: str
) -> None:
    own, record = [*words, "--out", "own"], Path.cwd() / "own.partial"
    name, job, _ = submitted(own, capsys)
    until("the first result", lambda: list(Path("own").glob(begun)), 300)
    working = list(commands(record))
    for process in working:
        process.suspend()  # or the job may be over before the command has answered
    assert main([*own, *SMALL]) == 0
    assert f"these jobs {words[0]} it already" in capsys.readouterr().out
    for process in working:
        process.kill()
    until("the end of the job", lambda: not plain.squeue(f"--name={name}"), 300)
    assert plain.states(job) == {job: "FAILED"}
    again, _, output = submitted(own, capsys)
    assert f"{name} (the jobs before)" in " ".join(output.split())
    assert f"{job}_0_log.err (did not finish)" in output
    until("the end of the job", lambda: not plain.squeue(f"--name={again}"), 600)
    assert not record.exists()
    assert main([*words, "--out", "alone"]) == 0
    expected = files("alone")
    assert expected
    assert files("own") == expected
