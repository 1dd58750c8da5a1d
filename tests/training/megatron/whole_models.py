"""The parts and the weights of a model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantexp.model.checkpoint_writer import Draft, write_part
from quantexp.model.checkpoints import STATE
from quantexp.model.huggingface.fit import fitting_weights
from quantexp.model.layout import Layout
from quantexp.model.saved_tensors import SavedTensors
from quantexp.schema import ModelConfig, Precision
from quantexp.training.megatron.initial_weights import draw_weights, load_weights
from quantexp.training.megatron.parameters import Part, parts_of
from quantexp.training.megatron.state_shards import weights_of

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


def saved_tensors(gpt: Any, model: ModelConfig, precision: Precision, folder: Path) -> SavedTensors:
    """The published tensors of a model whose weights are saved into a new folder."""
    state = weights_of([gpt], model, ALONE, 0)
    pieces = {name: each.piece for name, each in state.pieces.items()}
    draft = Draft(folder / "iteration_00000001", "token")
    hashes = write_part(draft, 0, dict(state.named_tensors()), pieces, {})
    return SavedTensors.open(draft.part / STATE, hashes, model, precision)
