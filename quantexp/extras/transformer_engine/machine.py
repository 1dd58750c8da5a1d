"""What a run's backend lacks on the machine that would run it: Transformer Engine, its version, a GPU that can.

Runs of this machine are checked against its GPU, jobs against the GPU type that they request, as far as it is known. A
run asks Transformer Engine itself when it builds its model. Runs of the emulation need none of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantexp.extras.transformer_engine.scheme.assignment import assignments
from quantexp.extras.transformer_engine.scheme.hardware import (
    PACKAGE,
    Gpu,
    gpu_named,
    obstacle,
    too_old,
    version_numbers,
)
from quantexp.extras.transformer_engine.scheme.recipes import Recipe
from quantexp.quant.precision import declared_maps
from quantexp.runs.device import has_driver
from quantexp.runs.provenance import versions
from quantexp.schema import Backend, Experiment, LauncherConfig
from quantexp.schema.quant import TE_INSTALL


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
