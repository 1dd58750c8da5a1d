"""What Transformer Engine makes of a planned run: the recipe of each linear module, how near it is, what prevents it.

Under `quant.backend=emulated` it is asked for with `plan device=NAME`, and answers what the run would be under
`quant.backend=transformer_engine`. The extra `transformer_engine` knows the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantexp.extra import Service, required
from quantexp.quant.precision import ModuleId
from quantexp.schema import Backend, Experiment

#: What no recipe covers.
_EMULATED = "attention, the output layer, routed experts, Adam's moments and gradients on their way stay emulated"
#: The word of a plan that names a GPU, and its beginning.
DEVICE = "device="


@dataclass(frozen=True)
class RecipePlan:
    """A recipe and its modules; null is the working precision."""

    recipe: str | None
    nearness: str
    notes: list[str]
    layers: list[int]
    modules: list[str]


@dataclass(frozen=True)
class BackendPlan:
    """The part of `quantexp plan --json` about Transformer Engine."""

    #: quant.backend; the rest is about transformer_engine if it is emulated.
    name: str
    #: The version here; null if it is not installed.
    transformer_engine: str | None
    #: The GPU that the answer is for; null if it is not known.
    device: str | None
    #: Of the first iteration.
    recipes: list[RecipePlan]
    #: Why no GPU, or the GPU asked for, can run it; null if nothing is known to prevent it.
    obstacle: str | None


def device_of(words: Sequence[str]) -> tuple[list[str], object | None]:
    """The overrides without `device=NAME`, and the GPU that it names.

    Raises:
        ConfigError: a GPU that is not in the table, or several.
    """
    names = [word.removeprefix(DEVICE) for word in words if word.startswith(DEVICE)]
    others = [word for word in words if not word.startswith(DEVICE)]
    if not names:
        return others, None
    return others, required(Service.DEVICE, f"{DEVICE}{names[-1]}")(names)


def backend_plan(experiment: Experiment, device: object | None) -> BackendPlan | None:
    """What Transformer Engine makes of a run on a GPU, or on its own machine; None if nobody asked."""
    backend = experiment.quant.backend
    if backend is Backend.emulated and device is None:
        return None
    planned = required(Service.BACKEND_PLAN, f"quant.backend={backend.value}")
    plan: BackendPlan = planned(experiment, device)
    return plan


def backend_lines(plan: BackendPlan | None) -> Iterator[tuple[str, str]]:
    """Headings and lines for a reader."""
    if plan is None:
        return
    version = plan.transformer_engine or "(not installed here)"
    place = "" if plan.device is None else f" on {plan.device}"
    if plan.name == Backend.emulated.value:
        yield "backend", f"emulated; quant.backend=transformer_engine{place} would be:"
    else:
        yield "backend", f"{plan.name}, Transformer Engine {version}{place}; {_EMULATED}"
    for each in plan.recipes:
        recipe = each.recipe or "the working precision"
        modules = ", ".join(each.modules)
        layers = f"layer{'s' * (len(each.layers) > 1)} {layer_ranges(each.layers)}"
        words = "; ".join([f"{recipe} in {modules} of {layers}: {each.nearness}", *each.notes])
        yield "recipe", words
    if plan.obstacle is not None:
        yield "", f"cannot run: {plan.obstacle}"
    elif plan.device is None:
        yield "", "plan device=NAME says whether that GPU can run it"


def layer_ranges(layers: list[int]) -> str:
    """`0-15` for consecutive numbers, otherwise the list."""
    if len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))


def recipes_by_module(experiment: Experiment) -> dict[ModuleId, str]:
    """The recipe of each module that Transformer Engine multiplies in the first iteration; empty for the emulation."""
    backend = experiment.quant.backend
    if backend is Backend.emulated:
        return {}
    recipes: dict[ModuleId, str] = required(
        Service.BACKEND_RECIPES, f"quant.backend={backend.value}"
    )(experiment)
    return recipes
