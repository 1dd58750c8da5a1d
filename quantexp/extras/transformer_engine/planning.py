"""The part of a plan about Transformer Engine, for the machine of a run or a GPU that is not there. Needs no torch.

It says what a run's backend lacks on the machine that would run it: Transformer Engine, its version, a GPU that can.
Runs of this machine are checked against its GPU, jobs against the GPU type that they request, as far as it is known. A
run asks Transformer Engine itself when it builds its model. Runs of the emulation need none of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from quantexp.cli.plan_backend import BackendPlan, RecipePlan
from quantexp.errors import ConfigError
from quantexp.extras.transformer_engine.scheme.assignment import Assignment, assignments
from quantexp.extras.transformer_engine.scheme.checking import check_backend
from quantexp.extras.transformer_engine.scheme.hardware import (
    CAPABILITIES,
    PACKAGE,
    Gpu,
    gpu_named,
    obstacle,
    too_old,
    version_numbers,
)
from quantexp.extras.transformer_engine.scheme.recipes import Recipe
from quantexp.quant.precision import ModuleId, declared_maps
from quantexp.runs.device import has_driver
from quantexp.runs.provenance import versions
from quantexp.schema import Backend, Experiment, LauncherConfig
from quantexp.schema.quant import TE_INSTALL


def devices() -> Iterable[str]:
    """The known names of GPUs."""
    return CAPABILITIES


def device_named(names: Sequence[str]) -> Gpu:
    """The GPU that a word of a plan names.

    Raises:
        ConfigError: a GPU that is not in the table, or several.
    """
    gpu = gpu_named(names[-1])
    if gpu is None or len(names) > 1:
        raise ConfigError(
            f"device must be one of {', '.join(CAPABILITIES)}, got {', '.join(names) or 'nothing'}"
        )
    return gpu


def backend_plan(experiment: Experiment, gpu: Gpu | None) -> BackendPlan:
    """What Transformer Engine makes of a run on a GPU, or on its own machine."""
    backend = experiment.quant.backend
    if backend is Backend.emulated:
        experiment = copy.deepcopy(experiment)
        experiment.quant.backend = Backend.transformer_engine
    machine = gpu or gpu_of(experiment.launcher)
    recipes: list[RecipePlan] = []
    try:
        check_backend(experiment)
        recipes = _recipes(experiment)
        obstacle = None if gpu is None else obstacle_of(used_recipes(experiment), gpu)
    except ConfigError as error:
        obstacle = str(error)
    return BackendPlan(
        backend.value,
        installed_version(),
        None if machine is None else machine.name,
        recipes,
        obstacle,
    )


def _recipes(experiment: Experiment) -> list[RecipePlan]:
    return [
        RecipePlan(
            None if each.recipe is None else str(each.recipe),
            each.nearness.value,
            list(each.notes),
            sorted({module.layer for module in each.modules}),
            list(dict.fromkeys(module.name for module in each.modules)),
        )
        for each in _first(experiment)
    ]


def recipes_by_module(experiment: Experiment) -> dict[ModuleId, str]:
    """The recipe of each module that Transformer Engine multiplies in the first iteration."""
    return {
        module: "Transformer Engine" if each.recipe is None else str(each.recipe)
        for each in _first(experiment)
        for module in each.modules
    }


def _first(experiment: Experiment) -> list[Assignment]:
    """The recipes of the first iteration."""
    return assignments(experiment, declared_maps(experiment.model, experiment.quant)[0])


def missing_for_backend(experiment: Experiment) -> str | None:
    """What a run's backend lacks on the machine that would run it; None if nothing is known to be missing."""
    backend, launcher = experiment.quant.backend, experiment.launcher
    if backend is Backend.emulated:
        return None
    key = f"quant.backend={backend.value}"
    if launcher.is_local or (launcher.python is None and launcher.container is None):
        version = installed_version()
        if version is None:
            return f"{key} needs Transformer Engine, which is not installed: {TE_INSTALL}"
        if (old := too_old(version)) is not None:
            return f"{key} {old}"
    if not has_gpu(launcher):
        where = "this machine has none" if launcher.is_local else "got launcher.gpus_per_node=0"
        return f"{key} needs an NVIDIA GPU, and {where}"
    gpu = gpu_of(launcher)
    reason = None if gpu is None else obstacle_of(used_recipes(experiment), gpu)
    return reason and f"{key}: {reason}"


def installed_version() -> str | None:
    """Transformer Engine's version here, without importing it; None if it is not installed."""
    return versions()[PACKAGE]


def used_recipes(experiment: Experiment) -> list[Recipe]:
    """Every recipe of a run, once."""
    maps = declared_maps(experiment.model, experiment.quant)
    recipes = (each.recipe for declared in maps for each in assignments(experiment, declared))
    return list(dict.fromkeys(recipe for recipe in recipes if recipe is not None))


def obstacle_of(recipes: Iterable[Recipe], gpu: Gpu) -> str | None:
    """Why a GPU cannot run one of the recipes; None if it can run all."""
    return next(filter(None, (obstacle(recipe, gpu) for recipe in recipes)), None)


def has_gpu(launcher: LauncherConfig) -> bool:
    """Whether the machine of a run has a GPU at all."""
    return this_gpu() is not None if launcher.is_local else launcher.gpus_per_node > 0


def gpu_of(launcher: LauncherConfig) -> Gpu | None:
    """The GPU that a run would have; None if it has none, or a job's is not known."""
    if launcher.is_local:
        return this_gpu()
    return None if launcher.gpu_type is None else gpu_named(launcher.gpu_type)


def this_gpu() -> Gpu | None:
    """This machine's first GPU."""
    if not has_driver():
        return None
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    cuda = version_numbers(torch.version.cuda)
    return Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), cuda)
