from __future__ import annotations

import os
from typing import Any

import pytest

from quantexp.analysis.draw.work import Task

from .conftest import Draw, Unhashed


class Deadly(str):
    """Text that ends the process which receives it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)


@pytest.mark.parametrize("part", ["statistics", "heatmaps"])
def test_a_tensor_that_ends_its_worker_is_named_and_the_rest_is_drawn(
    run: Unhashed, draws: Draw, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    deadly = run.lines[2]["file"]

    def task(entry: Any, source: str, *more: Any) -> Task:
        return Task(entry, Deadly(source) if entry.metadata["file"] == deadly else source, *more)

    monkeypatch.setattr("quantexp.analysis.draw.tensors.Task", task)
    outcome, complaints, _ = draws(run.run_dir, only=(part,), jobs=2)
    assert (outcome.num_tensors, len(complaints)) == (5, 1)
    assert deadly in complaints[0]
    assert "a worker process died with it" in complaints[0]


def test_a_torn_file_among_files_that_are_counted_together_is_named(
    run: Unhashed, draws: Draw
) -> None:
    (run.dir / run.lines[2]["file"]).write_bytes(b"torn")
    outcome, complaints, _ = draws(run.run_dir, only=("statistics",))
    assert len(complaints) == 1
    assert run.lines[2]["file"] in complaints[0]
    assert outcome.num_tensors == 5
