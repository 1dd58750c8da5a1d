"""Hydra discovers the plugin, which stays thin and validates every point before it runs one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra_plugins.quantexp_launcher import QuantexpLauncher
from omegaconf import DictConfig

from quantexp.config.compose import configuration
from quantexp.errors import ConfigError


def sweep(words: list[str], task: Callable[[DictConfig], Any], folder: Path) -> Any:
    """Run a multirun of quantexp's configuration as Hydra does; its sweeper writes into the folder."""
    with configuration(None) as extra:
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        return hydra.multirun(
            config_name="config",
            task_function=task,
            overrides=[*extra, f"hydra.sweep.dir={folder}", *words],
            with_log_configuration=False,
        )


def test_hydra_discovers_the_plugin() -> None:
    names = {plugin.__name__ for plugin in Plugins.instance().discover(Launcher)}
    assert QuantexpLauncher.__name__ in names


def test_importing_the_plugin_imports_neither_quantexp_nor_torch() -> None:
    script = (
        "import sys, hydra_plugins.quantexp_launcher\n"
        "sys.exit(bool({'quantexp', 'torch'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_no_point_runs_if_one_is_no_experiment(in_tmp: Path) -> None:
    ran: list[object] = []
    with pytest.raises(ConfigError, match=r"training\.iterations must be at least 1, got 0"):
        sweep(["training.iterations=5000,0"], ran.append, in_tmp)
    assert not ran


def test_failed_point_does_not_stop_those_after_it(in_tmp: Path) -> None:
    ran: list[int] = []

    def task(config: object) -> None:
        ran.append(len(ran))
        if len(ran) == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sweep(["training.seed=1,2,3"], task, in_tmp)
    assert ran == [0, 1, 2]


def test_jobs_have_the_task_s_return_values(in_tmp: Path) -> None:
    ((first, second),) = sweep(["training.seed=1,2"], lambda c: c.training.seed, in_tmp)
    assert [first.return_value, second.return_value] == [1, 2]
    assert first.status is JobStatus.COMPLETED
    assert list(second.overrides) == ["training.seed=2"]
