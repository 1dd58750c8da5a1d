"""Fills a rank's parts of a model: from published weights, from the shards of a checkpoint, or with random numbers.

Each rank reads the rows and columns of its own parts and no others, rounded to nearest in the working dtype; besides
the model, memory holds one block of a parameter at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from quantexp.config.start_point import StartPoint, start_point
from quantexp.errors import DataError
from quantexp.folders import user_path
from quantexp.model.checkpoint_hashes import require_intact
from quantexp.model.checkpoints import PADDING, STATE
from quantexp.model.huggingface.blocks import blocks_of
from quantexp.model.huggingface.fit import fitting_weights
from quantexp.model.huggingface.weights import Weights, open_weights, read_rows
from quantexp.model.layout import Layout
from quantexp.model.pieces import Piece
from quantexp.model.training_state import MAIN, SavedPieces, read_index
from quantexp.runs.ranks import own_rank
from quantexp.schema import Experiment
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.initial_weights import draw_weights, perturb_weights
from quantexp.training.megatron.parameters import Part, mark_divided, parts_of


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
