"""Run folders that are opened, completed and looked through."""

from __future__ import annotations

from pathlib import Path

from quantexp.config.load import read
from quantexp.launch.attempt import open_run
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status, write_status
from quantexp.schema import Experiment


def opening(experiment: Experiment) -> tuple[RunDir, str | None]:
    with open_run(experiment, "cpu", ["quantexp", "training=fast"]) as (folder, _):
        return folder.run, folder.skipped


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


def contents(folder: Path) -> dict[str, bytes]:
    """The files of an attempt; the lock and the fencing token belong to the folder."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in (".lock", ".start"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}
