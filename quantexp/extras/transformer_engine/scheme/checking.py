"""Refuses schemes, shapes and options that a backend with Transformer Engine's linear layers cannot run.

All of it follows from the configuration alone; `hardware` and the launch look at machines. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantexp.errors import ConfigError
from quantexp.extras.transformer_engine.scheme.assignment import assignments, is_native, misfit
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe
from quantexp.formats.types import Scaling
from quantexp.model.decoder import is_routed, layer_modules
from quantexp.model.layout import Layout
from quantexp.quant.precision import PrecisionMap, declared_maps, quantises_norms
from quantexp.schema import Backend, Experiment, Precision, Recompute


def check_backend(experiment: Experiment) -> None:
    """Refuse what the scheme's backend cannot run.

    Raises:
        ConfigError: names the key, or the slot.
    """
    quant = experiment.quant
    _check_recipe(experiment)
    if quant.backend is Backend.emulated:
        return
    backend = f"quant.backend={quant.backend.value}"
    if experiment.model.qkv_bias:
        raise ConfigError(
            f"{backend} has no model.qkv_bias: Transformer Engine adds the bias inside its product, where neither "
            "proof nor captures see it apart; take quant.backend=emulated"
        )
    if experiment.gradient.only:
        raise ConfigError(
            f"{backend} has no comparison of gradients, which turns single slots off; take quant.backend=emulated"
        )
    if quantises_norms(quant):
        raise ConfigError(
            f"{backend} has no quantised norms (quant.norm), whose formats have not been proved beside Transformer "
            "Engine's layers; take quant.backend=emulated, or leave the norms out"
        )
    recipes: set[Recipe] = set()
    for declared in declared_maps(experiment.model, quant):
        _check_parts(backend, declared)
        if quant.backend is Backend.transformer_engine:
            _check_experts(backend, declared)
        else:
            _check_clipping(backend, declared)
        for assigned in assignments(experiment, declared):
            if assigned.recipe is None:
                continue
            recipes.add(assigned.recipe)
            for reason in _obstacles(experiment, assigned.recipe):
                raise ConfigError(f"{backend}: {reason}")
            for module in assigned.modules:
                shape = layer_modules(experiment.model, module.layer)[module.name]
                assert shape is not None
                layout = Layout.of(experiment)
                if why := misfit(assigned.recipe, module.name, shape, experiment.training, layout):
                    raise ConfigError(f"{backend}: {module} {why}; keep it in bf16 by a rule")
    if len(recipes) > 1 and any(recipe.kind is Kind.DELAYED for recipe in recipes):
        raise ConfigError(
            f"{backend}: delayed scaling updates all scales at the end of a forward pass, and no module may have "
            f"another recipe, got {' and '.join(sorted(map(str, recipes)))}"
        )


def _check_recipe(experiment: Experiment) -> None:
    """Refuse a recipe by name where it has no effect."""
    quant = experiment.quant
    if quant.recipe is None:
        return
    key = f"quant.recipe={quant.recipe.value}"
    if quant.backend is not Backend.transformer_engine:
        raise ConfigError(
            f"{key} is for quant.backend=transformer_engine, got {quant.backend.value}; drop it"
        )
    maps = declared_maps(experiment.model, quant)
    specs = (spec for each in maps for module in each.values() for spec in module.alike.values())
    if not any(spec.scaling is Scaling.DELAYED for spec in specs):
        raise ConfigError(
            f"{key} scales slots with scaling=delayed, and none has it; set quant.linear.scaling=delayed, or drop it"
        )


def _check_experts(backend: str, declared: PrecisionMap) -> None:
    """Refuse formats of routed experts, which a native recipe cannot multiply."""
    for module in declared.values():
        if is_routed(module.module.name) and module.is_quantised:
            raise ConfigError(
                f"{backend}: {module.module} has any number of tokens, and Transformer Engine's kernels take "
                "multiples; keep routed experts in bf16: quant.rules=[{modules: [expert*], format: bf16}]"
            )


def _check_parts(backend: str, declared: PrecisionMap) -> None:
    """Refuse sums of parts, which are multiplied as more columns than Transformer Engine's layer has."""
    for module in filter(is_native, declared.values()):
        for entry in module.entries():
            if entry.spec.parts:
                raise ConfigError(
                    f"{backend}: {entry.label} is a sum of parts, and Transformer Engine multiplies one tensor an "
                    "operand; remove its parts, or take quant.backend=emulated"
                )


def _check_clipping(backend: str, declared: PrecisionMap) -> None:
    """Refuse derivatives that are not straight through."""
    for module in filter(is_native, declared.values()):
        for entry in module.entries():
            if entry.spec.clip_gradient:
                raise ConfigError(
                    f"{backend}: {entry.label} has clip_gradient, which needs x where Transformer Engine multiplies g "
                    "and w alone; remove it, or take quant.backend=emulated"
                )
            if entry.spec.dge is not None:
                raise ConfigError(
                    f"{backend}: {entry.label} has dge, which multiplies a weight's gradient, and Transformer Engine "
                    "adds it up by itself; remove it, or take quant.backend=emulated"
                )


def _obstacles(experiment: Experiment, recipe: Recipe) -> Iterator[str]:
    """Options that a recipe does not go with."""
    training = experiment.training
    if recipe.hadamard and training.precision is not Precision.bf16:
        yield (
            f"{recipe} transforms bfloat16 alone, got training.precision={training.precision.value}; take bf16"
        )
    if recipe.kind is not Kind.DELAYED:
        return
    if training.recompute is Recompute.full:
        yield (
            f"{recipe} would scale a recomputed forward pass otherwise, got training.recompute=full; take none or "
            "selective"
        )
    if Layout.of(experiment).chunks > 1:
        yield (
            f"{recipe} would update its scales after each chunk of a stage, got parallel.virtual_pipeline="
            f"{experiment.parallel.virtual_pipeline}; take 1"
        )
    if experiment.evaluation.every is not None or experiment.evaluate.only:
        yield (
            f"{recipe} would take the amaxes of an evaluation into its history, got "
            + ("quantexp evaluate" if experiment.evaluate.only else "evaluation.every")
            + "; leave it out"
        )
    for key, is_set in (
        ("checkpoint.optimizer", experiment.checkpoint.optimizer),
        ("training.start_optimizer", training.start_optimizer),
    ):
        if is_set:
            yield (
                f"{recipe} keeps its history in Transformer Engine, and no checkpoint has it, got {key}=true; set it "
                "to false"
            )
