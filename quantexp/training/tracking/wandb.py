"""Weights & Biases: a run in a project, from the thread of its upload.

W&B's own files are in the run folder's wandb/; `wandb sync` sends an offline run from there. W&B receives the
hyperparameters and curves, but no console output, source, git state or list of packages. It reads its API key itself,
from WANDB_API_KEY or from the file of `wandb login`. A restarted run continues the same W&B run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantexp.capture.statistics.counts import Counts
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State
from quantexp.schema import TrackingConfig
from quantexp.training.tracking.events import Point, TrackedRun, hyperparameters

NAME = "wandb"
REMOTE = True

#: Seconds that W&B has to answer when a run starts.
INIT_S = 30.0


def destination(tracking: TrackingConfig, run: RunDir) -> str:
    """Project, run and mode in words, with the folder of W&B's own files."""
    config = tracking.wandb
    project = config.project if config.entity is None else f"{config.entity}/{config.project}"
    mode = "as WANDB_MODE says, else online" if config.mode is None else config.mode.value
    return f"project {project}, run {run.root.name}, {mode}; its files in {run.wandb}"


class WandbTracker:
    """One W&B run, new or continued.

    Raises:
        wandb.Error: no API key, or no answer.
        OSError: its files cannot be written.
    """

    def __init__(self, run: TrackedRun, earlier: str | None = None) -> None:
        import wandb

        config = run.experiment.tracking.wandb
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            init_timeout=INIT_S,
            silent=True,
            stop_fn=_nothing,  # instead of an interrupt of the training
            x_save_requirements=False,
        )
        wandb.setup(settings)  # silent from here on, and not only once the run has begun
        try:
            self._run = wandb.init(
                id=run.id,
                name=run.name,
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.tags,
                mode=None if config.mode is None else config.mode.value,
                resume="allow",
                dir=str(run.folder.wandb.parent),  # W&B creates the folder itself
                config=dict(hyperparameters(run.experiment)),
                settings=settings,
            )
        except Exception:
            wandb.teardown()  # W&B's service would refuse the id of a failed start in this process
            raise
        self.id = run.id
        url = None if self._run.offline else self._run.url
        self.where = url or str(Path(self._run.dir).parent.relative_to(run.folder.root))

    def log(self, points: Sequence[Point]) -> None:
        """Log each point as a step of W&B's history, with the time of its measurement."""
        import wandb

        for point in points:
            histograms = {
                tag: wandb.Histogram(np_histogram=(list(counts.counts), _edges(counts)))
                for tag, counts in point.histograms.items()
            }
            values = {**point.scalars, **histograms, "_timestamp": point.time_s}
            self._run.log(values, step=point.iteration)

    def end(self, state: State, reason: str) -> None:
        """Finish or fail the run, with state and reason in its summary."""
        self._run.summary.update({"state": state.value, "reason": reason})
        self._run.finish(exit_code=0 if state is State.COMPLETED else 1)


start = WandbTracker


def _nothing() -> None:
    """The effect on the training of W&B's button that stops a run."""


def _edges(counts: Counts) -> list[int]:
    """The edges of the bins, one more than there are counts."""
    return list(range(counts.first, counts.first + len(counts.counts) + 1))
