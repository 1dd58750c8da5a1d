"""Hydra's launcher plugin: composes every point of a multirun before the first one starts.

Hydra programs other than quantexp's command line select it by `hydra/launcher=quantexp`. It also validates all points
that are quantexp experiments before the first run. Then it runs them in this process one after the other, as Hydra runs
a job (its folder, its logging, its callbacks); a failed point does not stop the later ones.

Every Hydra program of the environment imports this module, so it is thin and imports quantexp only when it launches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


@dataclass
class QuantexpLauncherConfig:
    """The configuration of `hydra/launcher=quantexp`."""

    _target_: str = "hydra_plugins.quantexp_launcher.QuantexpLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="quantexp", node=QuantexpLauncherConfig, provider="quantexp"
)


class QuantexpLauncher(Launcher):
    """Composes every point, validates every experiment, then runs them in order."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store the arguments of `launch`."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run every point; exceptions of the task become failed jobs.

        Raises:
            ConfigError: a point that should be an experiment is not valid; nothing has run.
        """
        setup_globals()
        points = [
            self._composed(overrides, initial_job_idx + index)
            for index, overrides in enumerate(job_overrides)
        ]
        for point in points:
            _validate(point)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        return [self._run(point) for point in points]

    def _composed(self, overrides: Sequence[str], number: int) -> DictConfig:
        point = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(point):
            point.hydra.job.id = point.hydra.job.num = number
        return point

    def _run(self, point: DictConfig) -> JobReturn:
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        return run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=point,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )


def _validate(point: DictConfig) -> None:
    from quantexp.config.compose import finished
    from quantexp.schema import Experiment

    kind = OmegaConf.get_type(point)
    if isinstance(kind, type) and issubclass(kind, Experiment):
        finished(point)
