"""The part of a plan about Transformer Engine, for the machine of a run or a GPU that is not there. Needs no torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from quantexp.cli.plan_backend import BackendPlan, RecipePlan
from quantexp.errors import ConfigError
from quantexp.extras.transformer_engine.machine import (
    gpu_of,
    installed_version,
    obstacle_of,
    used_recipes,
)
from quantexp.extras.transformer_engine.scheme.assignment import Assignment, assignments
from quantexp.extras.transformer_engine.scheme.checking import check_backend
from quantexp.extras.transformer_engine.scheme.hardware import CAPABILITIES, Gpu, gpu_named
from quantexp.quant.precision import ModuleId, declared_maps
from quantexp.schema import Backend, Experiment


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
