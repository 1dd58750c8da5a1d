"""Checkpoints of a model of 2,904 parameters, saved by one rank or several in this process, without a training."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from quantexp.config.compose import compose
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.layout import Layout
from quantexp.model.pieces import Piece
from quantexp.model.shards import shard_of
from quantexp.model.training_state import MAIN, MOMENTS
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import Rank
from quantexp.runs.status import Phase
from quantexp.schema import CheckpointConfig, Experiment
from quantexp.training.context import RunContext
from quantexp.training.megatron.state_shards import Held, RankState, written_pieces
from quantexp.training.saver import CheckpointSaver
from tests.model.huggingface.layouts import part_of
from tests.model.huggingface.published import LLAMA31, as_model

MODEL = as_model(
    {
        **LLAMA31,
        **{"vocab_size": 100, "hidden_size": 8, "intermediate_size": 12, "head_dim": 4},
        **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
    }
)
PUBLISHED = published(mapping(MODEL)).keys()
#: What the saver asks of a model.
CHUNKS: Any = [torch.nn.Linear(1, 1)]


class QuietContext(RunContext):
    """A context that writes no status."""

    def set_phase(self, phase: Phase) -> None:
        pass


def tiny_llama(num_ranks: int = 1, **checkpoint: Any) -> Experiment:
    """Divided over ranks by tensor parallelism; training waits for what is saved."""
    experiment = compose(["training=fast", "capture=off"], None, {})
    experiment.model = MODEL
    experiment.launcher.num_processes = experiment.parallel.tensor = num_ranks
    keys = {"every": 1, "optimizer": True, "asynchronous": False} | checkpoint
    experiment.checkpoint = CheckpointConfig(**keys)
    return experiment


def whole(iteration: int) -> dict[str, torch.Tensor]:
    """Every tensor of the training state by its name in a file, other ones after each iteration."""
    generator = torch.Generator().manual_seed(iteration)
    return {
        f"{kind}/{each.name}": torch.rand(each.shape, generator=generator)
        for kind in (MAIN, *MOMENTS)
        for each in mapping(MODEL)
    }


def state_of(experiment: Experiment, rank: int, iteration: int) -> RankState:
    """What a rank writes."""
    layout, tensors, held = Layout.of(experiment), whole(iteration), {}
    for each in mapping(MODEL):
        shard = shard_of(each.name, each.shape, layout, layout.place(rank))
        main, *moments = (
            part_of(tensors[f"{kind}/{each.name}"], shard) for kind in (MAIN, *MOMENTS)
        )
        adam = SimpleNamespace(
            state={main: dict(zip(MOMENTS, moments, strict=True)) | {"step": torch.tensor(1.0)}}
        )
        held[each.name] = Held(Piece(each.shape, shard, 0, main.numel()), main, adam)
    pieces = written_pieces(held, MODEL, layout, rank, distributed=False)
    return RankState(pieces, iteration, iteration)


def saver_of(run: RunDir, experiment: Experiment, rank: int = 0) -> CheckpointSaver:
    """The saver of a rank."""
    ranks = experiment.launcher.num_processes
    return CheckpointSaver(QuietContext(run, experiment, Rank(rank, ranks, rank)), "token")


def save(run: RunDir, experiment: Experiment, iteration: int) -> None:
    """Save on all ranks; rank 0 last, since training waits for what is saved.

    Raises:
        OSError, RunError: as the saver.
    """
    with contextlib.ExitStack() as savers:
        for rank in reversed(range(experiment.launcher.num_processes)):
            saver = savers.enter_context(contextlib.closing(saver_of(run, experiment, rank)))
            saver.save(iteration, CHUNKS, partial(state_of, experiment, rank, iteration), 0)
