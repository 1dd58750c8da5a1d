"""The parts and the weights of a model in one process."""

from __future__ import annotations

from typing import Any

from quantexp.model.huggingface.fit import fitting_weights
from quantexp.model.layout import Layout
from quantexp.schema import ModelConfig
from quantexp.training.megatron.initial_weights import draw_weights
from quantexp.training.megatron.parameters import Part, parts_of
from quantexp.training.megatron.published_weights import load_weights

ALONE = Layout()


def parts(gpt: Any, model: ModelConfig) -> dict[str, Part]:
    return parts_of([gpt], model, ALONE, ALONE.place(0))


def load(gpt: Any, model: ModelConfig) -> None:
    """Load the weights of `model.init_from`."""
    load_weights(parts(gpt, model), fitting_weights(model))


def draw(gpt: Any, model: ModelConfig, seed: int = 1234) -> Any:
    """Fill a model with initial weights and return it."""
    draw_weights(parts(gpt, model), model, seed)
    return gpt
