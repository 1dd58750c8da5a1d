"""A sweep: every point composed and validated, then run one after the other, whatever becomes of each.

`runs/sweeps/<time>.json` lists the runs and how they ended.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape

from quantexp.compose import finished, sweep
from quantexp.errors import QuantexpError, RunError
from quantexp.execute import Outcome, execute
from quantexp.progress import human_bytes
from quantexp.record import root_of
from quantexp.schema import Experiment
from quantexp.status import State, now, write_json
from quantexp.summary import print_sweep


def run_sweep(overrides: list[str], config_dir: Path | None, console: Console) -> int:
    """Run a multirun here and print its table; 0 if every run completed, 1 if any failed, 130 if interrupted.

    Raises:
        ConfigError: a point that is not an experiment; then nothing has run.
    """
    task = SweepTask(console)
    try:
        sweep(overrides, task, config_dir)
    except KeyboardInterrupt:
        if task.outcomes or task.failures:
            task.finish()
        raise
    return task.finish()


@dataclass
class SweepTask:
    """What Hydra's launcher calls for each point; remembers how each ended."""

    console: Console
    started: str = field(default_factory=now)
    outcomes: list[Outcome] = field(default_factory=list)
    #: Runs that could not start: (name, reason).
    failures: list[tuple[str, str]] = field(default_factory=list)
    plans: list[Experiment] = field(default_factory=list)
    root: Path | None = None

    def __call__(self, config: DictConfig) -> Any:
        """Run one point; a point that cannot start is remembered, not raised, so that the next one runs."""
        experiment = finished(config)
        if experiment.dry_run:
            self.plans.append(experiment)
            return None
        self.root = root_of(experiment)
        name = f"{experiment.model.name} {experiment.dataset.name} {experiment.quant.name}"
        try:
            outcome = execute(experiment, self.console)
        except QuantexpError as error:
            self.failures.append((name, str(error)))
            self.console.print(
                f"[red]failed[/]     {escape(name)}: {escape(str(error))}", soft_wrap=True
            )
            return None
        except Exception as error:  # noqa: BLE001  (a bug in one point does not take the others' table away)
            traceback.print_exc()
            self.failures.append((name, f"{type(error).__name__}: {error}"))
            return None
        self.outcomes.append(outcome)
        self._write()
        self.console.print(_line(name, outcome), soft_wrap=True)
        if outcome.state is State.CANCELLED:
            raise KeyboardInterrupt
        return outcome

    def finish(self) -> int:
        """The table, and the exit code."""
        if self.plans:
            from quantexp.plan import make_plan, print_plan

            for experiment in self.plans:
                print_plan(make_plan(experiment), self.console)
            return 0
        if not self.outcomes and not self.failures:
            raise RunError("the sweep has no points")
        print_sweep(self.outcomes, self.failures, self.console)
        self._write()
        completed = all(outcome.state is State.COMPLETED for outcome in self.outcomes)
        return 0 if completed and not self.failures else 1

    def _write(self) -> None:
        assert self.root is not None
        folder = self.root / "sweeps"
        stamp = datetime.fromisoformat(self.started).astimezone(UTC).strftime("%Y%m%d_%H%M%S_%f")
        runs: list[dict[str, object]] = [
            {
                "run": o.run.root.name,
                "state": o.state.value,
                "skipped": o.skipped,
                "reason": o.reason,
            }
            for o in self.outcomes
        ]
        runs += [
            {
                "run": None,
                "state": State.FAILED.value,
                "skipped": False,
                "reason": f"{name}: {reason}",
            }
            for name, reason in self.failures
        ]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / f"{stamp}.json", {"started": self.started, "runs": runs})
        except OSError as error:
            raise RunError(
                f"the sweep's list of runs cannot be written to {folder}: {error.strerror}; set "
                "paths.root to a folder that can"
            ) from error


def _line(name: str, outcome: Outcome) -> str:
    if outcome.state is not State.COMPLETED:
        return f"[red]{outcome.state.value:10}[/] {escape(name)}: {escape(outcome.reason)}"
    word = "skipped" if outcome.skipped else "completed"
    metrics = outcome.metrics or {}
    loss = f"loss {metrics['loss']:.4f}" if metrics else ""
    return f"[green]{word:10}[/] {escape(name)}: {loss}, {outcome.tensors} tensors, {human_bytes(outcome.num_bytes)}"
