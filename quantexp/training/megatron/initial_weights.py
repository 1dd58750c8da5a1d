"""Fills a rank's parts of a model: from published weights, from the shards of a checkpoint, or with random numbers.

Each rank reads the rows and columns of its own parts and no others, rounded to nearest in the working dtype; besides
the model, memory holds one block of a parameter at a time.

Random weights are the same in every layout. Every parameter is drawn whole, in fp32, by a CPU generator of its own,
whose seed follows from the run's seed and the parameter's global name; each rank keeps its part, rounded to the working
dtype. The distributions are Megatron's:

    norms                            1
    biases                           0
    proj and fc2 (experts too)       normal(0, init_std / sqrt(2 layers))
    all others                       normal(0, init_std), the padding of the vocabulary included

Besides the model, memory holds one whole parameter at a time. On a CPU torch's generator takes 32 bits of a seed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from quantexp.config.start_point import StartPoint, start_point
from quantexp.errors import DataError
from quantexp.folders import user_path
from quantexp.model.checkpoint_hashes import require_intact
from quantexp.model.checkpoints import PADDING, STATE
from quantexp.model.huggingface.blocks import blocks_of
from quantexp.model.huggingface.fit import fitting_weights
from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.huggingface.weights import Weights, open_weights, read_rows
from quantexp.model.layout import Layout
from quantexp.model.pieces import Piece
from quantexp.model.shards import Shard, axis_of
from quantexp.model.training_state import MAIN, SavedPieces, read_index
from quantexp.quant.step_state import seed_of
from quantexp.runs.ranks import own_rank
from quantexp.schema import Experiment, ModelConfig, TrainingConfig
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.parameters import Part, mark_divided, parts_of
from quantexp.training.megatron.transformer_config import DTYPES

#: The share of elements that `perturb_weights` moves.
PERTURBED_SHARE = 0.01
_BITS = {2: torch.int16, 4: torch.int32}


@torch.no_grad()
def draw_weights(parts: Mapping[str, Part], model: ModelConfig, seed: int) -> None:
    """Fill a rank's parts of a model with its initial weights."""
    for part in parts.values():
        if part.parameter.width is None:
            part.tensor.fill_(0.0 if part.parameter.name.endswith(".bias") else 1.0)
        else:
            _copy_part(_drawn(part.parameter, model, seed), part.shard, part.tensor)


@torch.no_grad()
def perturb_weights(parts: Mapping[str, Part], training: TrainingConfig) -> None:
    """Move a share of the elements by one unit in the last place of the working dtype, half of them away from zero.

    Which ones follows from `training.seed`, `training.chaos` and the parameter's global name, and so is the same in
    every layout. Zeros stay, and all elements do if `training.chaos` is 0.
    """
    if not training.chaos:
        return
    seed = seed_of(training.seed, f"chaos {training.chaos}")
    dtype = DTYPES[training.precision]
    for name, part in parts.items():
        generator = torch.Generator().manual_seed(seed_of(seed, name))
        drawn = torch.rand(part.parameter.shape, generator=generator)
        whole = (drawn < PERTURBED_SHARE / 2).char() - (drawn >= 1 - PERTURBED_SHARE / 2).char()
        steps = torch.empty(part.tensor.shape, dtype=torch.int8)
        _copy_part(whole, part.shard, steps)
        own = part.tensor.to(dtype)  # norms are in float32 until Megatron rounds them
        bits = own.view(_BITS[dtype.itemsize])
        moved = (bits + steps.to(bits)).view(dtype)
        part.tensor.copy_(torch.where(own == 0, own, moved))


def _copy_part(whole: Tensor, shard: Shard, to: Tensor) -> None:
    """Copy a rank's part of a whole parameter."""
    row, axis = 0, shard.axis or 0
    for start, stop in shard.ranges or ((0, whole.shape[0]),):
        piece = whole.narrow(axis, start, stop - start)
        to.narrow(axis, row, stop - start).copy_(piece)
        row += stop - start


def _drawn(parameter: Parameter, model: ModelConfig, seed: int) -> Tensor:
    std = model.init_std
    if axis_of(parameter.name) == 1:
        std /= math.sqrt(2.0 * model.num_layers)
    generator = torch.Generator().manual_seed(seed_of(seed, parameter.name))
    return torch.empty(parameter.shape).normal_(0.0, std, generator=generator)


def load_initial_weights(
    chunks: Sequence[GPTModel], experiment: Experiment, own: StartPoint | None = None
) -> StartPoint | None:
    """Fill a new model with its configured initial weights; returns the checkpoint to resume from, or None.

    Weights of the run's `own` checkpoint are not loaded here: they follow from the training state.

    Every rank calls this, inside `session` and before the model is wrapped.

    Raises:
        DataError: weights are missing, damaged or of another model.
    """
    model, layout = experiment.model, Layout.of(experiment)
    place = layout.place(torch.distributed.get_rank())
    parts = parts_of(chunks, model, layout, place)
    mark_divided(parts)
    if own is not None:
        return own
    start = start_point(experiment)
    if start is not None and start.is_in_shards:
        _load_shards(parts, start)
    elif start is not None:
        _require_intact(start.weights, (STATE,))  # `load_state` checks what it reads
        padding = open_weights(start.padding) if start.padding.is_file() else None
        load_weights(parts, fitting_weights(model, start.weights), padding)
    elif model.init_from is not None:
        _require_intact(user_path(model.init_from), (STATE, PADDING))
        load_weights(parts, fitting_weights(model))
    else:
        draw_weights(parts, model, experiment.training.seed)
    perturb_weights(parts, experiment.training)
    return start


@torch.no_grad()
def _load_shards(parts: Mapping[str, Part], start: StartPoint) -> None:
    """Load a rank's parts, padding included, from the main weights of a checkpoint of any layout.

    Raises:
        DataError: as `load_initial_weights`.
    """
    _require_intact(start.weights, ())
    files = read_index(start.state).files
    saved = SavedPieces.open(start.state.parent, files, parts)
    for name, part in parts.items():
        piece = Piece(part.parameter.shape, part.shard, 0, part.tensor.numel())
        part.tensor.copy_(saved.read(name, piece, (MAIN,))[MAIN].view(part.tensor.shape))


@torch.no_grad()
def load_weights(
    parts: Mapping[str, Part], weights: Weights, padding: Weights | None = None
) -> None:
    """Load matching weights into a rank's parts.

    The vocabulary's padding rows, which are trained but are not part of a published model, come from `padding`, by
    Megatron's names; without it they become zero.
    """
    for name, part in parts.items():
        for block in blocks_of(part.parameter, part.shard):
            rows = part.tensor[block.part_row : block.part_row + block.count]
            origin = padding if block.tensor == name else weights
            if origin is None:
                rows.zero_()
            else:
                stored = origin.tensors[block.tensor]
                rows.copy_(read_rows(stored, block.first, block.count, block.columns))


def _require_intact(path: Path, leave_out: Collection[str]) -> None:
    """Refuse damaged weights on all ranks; one rank of each machine reads them for it.

    Raises:
        DataError: names the first damage.
    """
    words = None
    if own_rank(torch.distributed.get_world_size()).local_rank == 0:
        try:
            require_intact(path, leave_out)
        except DataError as error:
            words = str(error)
    if damage := [each for each in gather(words) if each is not None]:
        raise DataError(damage[0])
