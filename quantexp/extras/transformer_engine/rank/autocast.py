"""Enters Transformer Engine's autocast, once a module for all recipes but delayed scaling.

Delayed scaling updates the scales of all modules at the end of the outermost autocast, and those of gradients at its
first module. A module that enters its own would therefore update every scale once a module, and shift the history as
often. Under delayed scaling the decoder enters the one autocast, and its modules none (`Decoder`).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from typing import Any

from megatron.core.parallel_state import get_amax_reduction_group, model_parallel_is_initialized
from megatron.core.transformer.transformer_block import TransformerBlock

from quantexp.extras.transformer_engine.rank.recipes import te_recipe
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe


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
