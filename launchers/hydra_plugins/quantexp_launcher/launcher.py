"""The launcher plugin: every point of a sweep is composed and validated before the first one starts.

Hydra imports this module in every Hydra program of the environment, so it stays thin and imports quantexp only when it
launches. The points run one after the other; one that fails does not stop those after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class QuantexpLauncherConfig:
    """What `hydra/launcher=quantexp` composes to."""

    _target_: str = "hydra_plugins.quantexp_launcher.launcher.QuantexpLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="quantexp", node=QuantexpLauncherConfig, provider="quantexp"
)


class QuantexpLauncher(Launcher):
    """Composes every point, validates every point, then runs them in order."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what `launch` needs."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run every point; the task's exceptions become failed jobs.

        Raises:
            ConfigError: a point that is not an experiment, before anything has run.
        """
        from quantexp.compose import finished

        loader = self.hydra_context.config_loader
        points = [loader.load_sweep_config(self.config, list(o)) for o in job_overrides]
        for point in points:
            finished(point)
        return [
            self._run(point, overrides)
            for point, overrides in zip(points, job_overrides, strict=True)
        ]

    def _run(self, point: DictConfig, overrides: Sequence[str]) -> JobReturn:
        job = JobReturn(overrides=overrides, cfg=point)
        try:
            job.return_value = self.task_function(point)
            job.status = JobStatus.COMPLETED
        except Exception as error:  # noqa: BLE001  (kept in the job, as Hydra's contract has it)
            job.return_value = error
            job.status = JobStatus.FAILED
        return job
