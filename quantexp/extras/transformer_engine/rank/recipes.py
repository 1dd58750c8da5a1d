"""Transformer Engine's recipe object for a recipe, with every setting passed and read back.

Three properties of the objects make that necessary (seen in 2.11.0). An unknown keyword is dropped. Settings that are
left out follow NVTE_* variables as they were at import. And `Float8CurrentScaling(use_power_2_scales=True)` has no
effect in `te.Linear`, which takes the three `QParams` instead, class attributes that are no fields.
"""

from __future__ import annotations

import dataclasses
import importlib
from functools import cache
from typing import Any

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
