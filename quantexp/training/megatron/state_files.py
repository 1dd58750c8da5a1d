"""Writes the training state of a checkpoint: each rank its own file, rank 0 the index of all.

All ranks call `write_state` while rank 0 writes the checkpoint. They send each other hashes and amax histories; tensors
stay where they are, and are copied to the host one at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantexp.errors import QuantexpError, RunError
from quantexp.folders import beside, sync
from quantexp.model.checkpoint_hashes import FileHash, hash_of
from quantexp.model.checkpoints import STATE, STATE_INDEX
from quantexp.model.layout import Layout
from quantexp.model.safetensors import write_safetensors
from quantexp.model.training_state import (
    VERSION,
    StateIndex,
    metadata_of,
    rank_file,
    write_index,
)
from quantexp.runs.disk import writing
from quantexp.training.log import first_line
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.finite import require_finite, tensors_in
from quantexp.training.megatron.state_shards import RankState

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Written:
    """What a rank sends to all others."""

    #: Its error in one line.
    error: str | None = None
    #: By its file's name; empty if it writes nothing.
    hashes: dict[str, FileHash] = field(default_factory=dict)
    amax_histories: dict[str, Any] = field(default_factory=dict)


def write_state(
    folder: Path, iteration: int, layout: Layout, state: RankState
) -> dict[str, FileHash]:
    """Write the training state of a checkpoint that rank 0 has begun; every rank calls this.

    Args:
        folder: the checkpoint's final folder; the files go to its temporary name.
        iteration: the last complete one.
        layout: the run's.
        state: this rank's.

    Returns:
        On rank 0 the hashes of the ranks' files, by their names in the checkpoint: `state/rank00003.safetensors`.

    Raises:
        OSError: on rank 0: its file cannot be written.
        RunError: on rank 0: another rank failed, with its words, or a value is NaN or Inf.
    """
    into, rank, failure = beside(folder) / STATE, torch.distributed.get_rank(), None
    try:
        own = _Written(None, _write_own(into, rank, folder, state), state.amax_histories)
    except Exception as error:
        own, failure = _Written(first_line(error)), error
        if not isinstance(error, QuantexpError | OSError):
            LOG.exception("the training state was not written")
    written = gather(own)
    if rank:
        return {}  # rank 0 ends all ranks with the error
    if failure is not None:
        raise failure
    if words := next((each.error for each in written if each.error is not None), None):
        raise RunError(words)
    _write_index(into, iteration, layout, state, written)
    return {f"{STATE}/{name}": hashes for each in written for name, hashes in each.hashes.items()}


def _write_own(into: Path, rank: int, folder: Path, state: RankState) -> dict[str, FileHash]:
    """Write this rank's file, on the disk afterwards."""
    numbers = tensors_in({"amax_histories": state.amax_histories})
    for _ in require_finite(numbers, folder):
        pass
    tensors = dict(require_finite(state.named_tensors(), folder))
    if not tensors:
        return {}
    into.mkdir(parents=True, exist_ok=True)
    file = into / rank_file(rank)
    with writing(file, sum(x.numel() * x.element_size() for x in tensors.values())):
        pieces = {name: each.piece for name, each in state.pieces.items()}
        write_safetensors(file, tensors, metadata_of(pieces))
        sync(file)
        return {file.name: hash_of(file)}


def _write_index(
    into: Path, iteration: int, layout: Layout, state: RankState, written: Sequence[_Written]
) -> None:
    """Write state.json; ranks that share a stream have equal histories of it."""
    index = StateIndex(
        version=VERSION,
        iteration=iteration,
        layout=asdict(layout),
        schedule_steps=state.schedule_steps,
        optimizer_steps=state.optimizer_steps,
        loss_scale=state.loss_scale,
        amax_histories={s: h for each in written for s, h in each.amax_histories.items()},
        files={n: h["xxh3_128"] for each in written for n, h in each.hashes.items()},
    )
    write_index(into / STATE_INDEX, index)
    for path in (into / STATE_INDEX, into):
        sync(path)
