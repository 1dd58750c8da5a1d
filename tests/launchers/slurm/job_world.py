"""A submitted run, as its job finds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from quantexp_launchers.slurm import job

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status, write_status
from quantexp.schema import Experiment

BEGINS_AGAIN = "it will begin again at its first iteration"


@dataclass
class World:
    """A submitted run, as its job finds it."""

    task: job.Task
    experiment: Experiment
    monkeypatch: pytest.MonkeyPatch

    @property
    def run(self) -> RunDir:
        return self.task.run

    @property
    def status(self) -> Status:
        status = read_status(self.run.status)
        assert status is not None
        return status

    def record(self, state: State, reason: str = "", **values: object) -> None:
        """Write a status as the run does."""
        status = replace(self.status, state=state, reason=reason, **values)  # type: ignore[arg-type]
        write_status(self.run.status, status)

    def started(self, times: int) -> job.Task:
        """The job at its next start."""
        self.monkeypatch.setenv("QUANTEXP_START", f"12 {times}")
        return replace(self.task, starts_before=times)

    def trains(self, iteration: int = 3) -> None:
        """Leave the folder as a training run does."""
        self.record(State.RUNNING, iteration=iteration, started="2026-01-01T00:00:00.000+00:00")
        self.run.metrics.write_text('{"iteration": 1}\n')
        self.run.rank_log(0).write_text("words\n")
