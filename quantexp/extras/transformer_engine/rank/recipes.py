"""Transformer Engine's recipe object for a recipe, with every setting passed and read back, and its autocast.

Three properties of the objects make that necessary (seen in 2.11.0). An unknown keyword is dropped. Settings that are
left out follow NVTE_* variables as they were at import. And `Float8CurrentScaling(use_power_2_scales=True)` has no
effect in `te.Linear`, which takes the three `QParams` instead, class attributes that are no fields.

Autocast is entered once a module for all recipes but delayed scaling, which updates the scales of all modules at the
end of the outermost autocast, and those of gradients at its first module. A module that enters its own would therefore
update every scale once a module, and shift the history as often. Under delayed scaling the decoder enters the one
autocast, and its modules none (`Decoder`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterable
from functools import cache
from typing import Any

from megatron.core.parallel_state import get_amax_reduction_group, model_parallel_is_initialized
from megatron.core.transformer.transformer_block import TransformerBlock

from quantexp.errors import RunError
from quantexp.extras.transformer_engine.rank.support import te_version
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe

#: Settings of later versions, most of which NVTE_* variables turn on, and the value that leaves the recipe as it is.
_NEUTRAL = {
    "backward_override": None,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
    "nvfp4_4over6_e4m3_use_256": "all",
    "nvfp4_4over6_err_mode": "MAE",
    "enable_2d_quantization": False,
}
_QPARAMS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


@cache
def te_recipe(recipe: Recipe) -> Any:
    """The object for a native recipe; one for all modules.

    Raises:
        RunError: this version does not have a setting, or does not keep it.
    """
    common: Any = importlib.import_module("transformer_engine.common.recipe")
    made = make_recipe(recipe.kind, _settings(recipe, common))
    if recipe.kind in (Kind.CURRENT, Kind.BLOCK):
        for name in _QPARAMS:
            setattr(made, name, common.QParams(power_2_scale=recipe.power_of_two))
    return made


def make_recipe(kind: Kind, settings: dict[str, Any]) -> Any:
    """An object of a recipe's class with these settings.

    Raises:
        RunError: the class does not have a setting, or does not keep it.
    """
    common: Any = importlib.import_module("transformer_engine.common.recipe")
    recipe_class = getattr(common, kind.value)
    fields = {field.name for field in dataclasses.fields(recipe_class)}
    settings = {name: value for name, value in _NEUTRAL.items() if name in fields} | settings
    made = recipe_class(**{name: value for name, value in settings.items() if name in fields})
    for name, value in settings.items():
        if name not in fields or getattr(made, name) != value:
            raise RunError(
                f"Transformer Engine {te_version()} does not keep {kind.value}({name}={value}), and drops it without a "
                "message; use another version"
            )
    return made


def _settings(recipe: Recipe, common: Any) -> dict[str, Any]:
    fp8_format = common.Format.HYBRID if recipe.hybrid else common.Format.E4M3
    match recipe.kind:
        case Kind.MXFP8:
            return {"fp8_format": fp8_format}
        case Kind.CURRENT:
            return {"fp8_format": fp8_format, "use_power_2_scales": recipe.power_of_two}
        case Kind.DELAYED:
            return {
                "fp8_format": fp8_format,
                "amax_history_len": recipe.history,
                "amax_compute_algo": "max",
                "margin": 0,
            }
        case Kind.BLOCK:
            return {
                "fp8_format": fp8_format,
                "use_f32_scales": not recipe.power_of_two,
                "x_block_scaling_dim": 1,
                "w_block_scaling_dim": 1 if recipe.weight_rows == 1 else 2,
                "grad_block_scaling_dim": 1,
            }
        case Kind.NVFP4:
            return {
                "disable_rht": not recipe.hadamard,
                "disable_stochastic_rounding": not recipe.stochastic,
                "disable_2d_quantization": recipe.weight_rows == 1,
            }
        case Kind.CUSTOM:
            raise ValueError("a custom recipe belongs to one module")


def _manager() -> Any:
    return importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager


def autocast(recipe: Any | None) -> contextlib.AbstractContextManager[None]:
    """A context in which Transformer Engine's modules quantise by a recipe object, or with None do not quantise."""
    manager = _manager()
    if recipe is None and not manager.is_fp8_enabled():
        return contextlib.nullcontext()
    if recipe is not None and manager.is_fp8_enabled() and manager.get_fp8_recipe() is recipe:
        return contextlib.nullcontext()
    pytorch: Any = importlib.import_module("transformer_engine.pytorch")
    group = None
    if recipe is not None and recipe.delayed() and model_parallel_is_initialized():
        group = get_amax_reduction_group(with_context_parallel=True)
    context: contextlib.AbstractContextManager[None] = pytorch.autocast(
        enabled=recipe is not None, recipe=recipe, amax_reduction_group=group
    )
    return context


def forget_earlier_models() -> None:
    """Drop what Transformer Engine holds of an earlier model of this process, whose scales it would go on to update."""
    _manager().reset()


def decoder_of_new_model() -> type[Decoder]:
    """The class of a new model's decoder, before it is built; earlier models of this process are forgotten."""
    forget_earlier_models()
    return Decoder


class Decoder(TransformerBlock):  # type: ignore[misc]
    """Megatron's decoder, inside one autocast where its modules have delayed scaling."""

    #: The recipe of modules with delayed scaling; None if there is none.
    delayed: Recipe | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's forward pass."""
        recipe = None if self.delayed is None else te_recipe(self.delayed)
        with autocast(recipe):
            return super().forward(*args, **kwargs)

    def use_recipes(self, recipes: Iterable[Recipe | None]) -> None:
        """Take the recipes of the decoder's modules, whenever they may have changed."""
        delayed = (each for each in recipes if each is not None and each.kind is Kind.DELAYED)
        self.delayed = next(delayed, None)
