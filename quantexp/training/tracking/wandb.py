"""Weights & Biases: a run in a project there, from the courier's process.

W&B's own files are in the run folder's wandb/, and what could not be sent from there `wandb sync` sends later. It is
given the hyperparameters and curves, and no console output, source, git state or list of packages. An API key is read
by W&B itself, from WANDB_API_KEY or what `wandb login` left. A restarted run goes on with the same W&B run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State
from quantexp.schema import TrackingConfig
from quantexp.training.tracking.events import Point, TrackedRun, hyperparameters

NAME = "wandb"
REMOTE = True

#: Seconds that W&B may take to answer when a run starts.
INIT_S = 30.0


def enabled(tracking: TrackingConfig) -> bool:
    """Whether it is asked for."""
    return tracking.wandb.enabled


def destination(tracking: TrackingConfig, run: RunDir) -> str:
    """What is written where, in words."""
    config = tracking.wandb
    project = config.project if config.entity is None else f"{config.entity}/{config.project}"
    mode = "as WANDB_MODE says, else online" if config.mode is None else config.mode.value
    return f"project {project}, run {run.root.name}, {mode}; its files in {run.wandb}"


def start(run: TrackedRun, earlier: str | None = None) -> WandbTracker:
    """The W&B run, made there or found again.

    Raises:
        wandb.Error: no API key, or no answer.
        OSError: its files cannot be written.
    """
    return WandbTracker(run)


class WandbTracker:
    """One W&B run."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        config = run.experiment.tracking.wandb
        self._run = wandb.init(
            id=run.id,
            name=run.name,
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=None if config.mode is None else config.mode.value,
            resume="allow",
            dir=str(run.folder.wandb.parent),  # it makes the folder itself
            config=dict(hyperparameters(run.experiment)),
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                init_timeout=INIT_S,
                silent=True,
                x_save_requirements=False,
            ),
        )
        self.id = run.id
        local = Path(self._run.dir).parent
        self.where = self._run.url or str(local.relative_to(run.folder.root))

    def log(self, points: Sequence[Point]) -> None:
        """One step of W&B's history for each point, with the time it was measured."""
        for point in points:
            self._run.log({**point.scalars, "_timestamp": point.time_s}, step=point.iteration)

    def end(self, state: State, reason: str) -> None:
        """State and reason in the run's summary; it is shown as finished or failed."""
        self._run.summary.update({"state": state.value, "reason": reason})
        self._run.finish(exit_code=0 if state is State.COMPLETED else 1)
