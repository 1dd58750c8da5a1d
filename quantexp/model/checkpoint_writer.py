"""Writes a checkpoint from the shards of its ranks, without a message between them.

    every rank      `write_part`: state/rank00003.safetensors; then its record (`quantexp.model.rank_records`)
    rank 0          waits for all records; `complete`: state.json, the published form from the shards, hashes.json

All of it lies in a folder with a temporary name, on the disk (fsync) before the folder is renamed: after a kill or a
power failure, a folder with the final name is whole. The temporary name has a token that the ranks of one start share,
so that no rank writes into what an earlier start left; `remove_leftovers` removes that.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.folders import PART, sync
from quantexp.model.checkpoint_hashes import FileHash, record_hashes, write_hashed
from quantexp.model.checkpoints import (
    HIDDEN,
    PADDING,
    STATE,
    STATE_INDEX,
    checkpoint_bytes,
    iteration_of,
    remove,
)
from quantexp.model.finite import require_finite, tensors_in
from quantexp.model.huggingface.token_roles import TokenRoles
from quantexp.model.pieces import Piece
from quantexp.model.publish import write_config, write_padding, write_published
from quantexp.model.rank_records import RECORDS, RankRecord, num_others
from quantexp.model.safetensors import described
from quantexp.model.saved_tensors import SavedTensors, dtype_name_of
from quantexp.model.training_state import (
    StateIndex,
    metadata_of,
    rank_file,
    write_index,
)
from quantexp.runs.disk import writing
from quantexp.schema import Experiment

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written."""

    #: The folder's final name.
    folder: Path
    #: The same on all ranks of a start, and no other start's.
    token: str
    num_ranks: int = 1
    #: What its configuration says of tokens.
    roles: TokenRoles = field(default_factory=TokenRoles)

    @property
    def part(self) -> Path:
        """The folder's temporary name."""
        return self.folder.with_name(f"{HIDDEN}{self.folder.name}.{self.token}{PART}")


def new_token() -> str:
    """A token that no other start has."""
    return secrets.token_hex(8)


def remove_leftovers(checkpoints: Path) -> None:
    """Remove what earlier starts of a run began to write or to remove; only before any rank of this start writes."""
    for path in checkpoints.glob(f"{HIDDEN}*"):
        shutil.rmtree(path, ignore_errors=True)


def write_part(
    draft: Draft,
    rank: int,
    tensors: Mapping[str, Tensor],
    pieces: Mapping[str, Piece],
    amax_histories: Mapping[str, Any],
) -> dict[str, FileHash]:
    """Write a rank's file, on the disk afterwards.

    Args:
        draft: the checkpoint.
        rank: this process's.
        tensors: by their names in the file: `exp_avg/NAME`.
        pieces: by NAME, what they are of.
        amax_histories: only checked.

    Returns:
        The file's hashes by its name; empty if the rank has no tensors and writes no file.

    Raises:
        OSError: the file cannot be written.
        RunError: a value is NaN or Inf; there is no file then.
    """
    require_finite(tensors_in({"amax_histories": amax_histories}), draft.folder)
    if not tensors:
        return {}
    file = draft.part / STATE / rank_file(rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    with writing(draft.folder / STATE / file.name, sum(x.nbytes for x in tensors.values())):
        hashes = write_hashed(
            file, described(tensors), tensors.values(), metadata_of(pieces), draft.folder
        )
        for path in (file, file.parent):
            sync(path)
        return {file.name: hashes}


def complete(
    draft: Draft,
    experiment: Experiment,
    records: Sequence[RankRecord],
    index: StateIndex,
    require_right: Callable[[], None] = lambda: None,
) -> None:
    """Make a checkpoint of the shards, whose records are there, and give its folder its final name.

    A folder that has the name is replaced. After an error the new one is removed: no rank writes into it any more.

    Args:
        draft: the checkpoint.
        experiment: model, precision, and what belongs to a checkpoint.
        records: those of all ranks.
        index: of state.json, without what the records say.
        require_right: called before the folder gets its name; raises if this process may not give it.

    Raises:
        OSError: a file cannot be written.
        RunError: a weight is NaN or Inf in the working dtype.
    """
    try:
        with writing(draft.folder, checkpoint_bytes(experiment)):
            _make_whole(draft, experiment, records, index)
            require_right()
            if draft.folder.exists():
                remove(draft.folder)
            draft.part.rename(draft.folder)
            sync(draft.folder.parent)
    except Exception:
        shutil.rmtree(draft.part, ignore_errors=True)
        raise


def _make_whole(
    draft: Draft, experiment: Experiment, records: Sequence[RankRecord], index: StateIndex
) -> None:
    """Write all that a checkpoint has besides its shards, and remove what it does not keep."""
    state = {name: each for record in records for name, each in record.hashes.items()}
    known = _write_content(draft, experiment, sorted(state))
    if experiment.checkpoint.optimizer:
        _write_index(draft.part, records, index, state)
        known |= {f"{STATE}/{name}": each for name, each in state.items()}
    else:
        shutil.rmtree(draft.part / STATE)
    shutil.rmtree(draft.part / RECORDS)
    _sync_all(draft, known)


def discard(draft: Draft, patience_s: float) -> None:
    """Remove a checkpoint whose parts failed, as soon as no other rank writes into it; rank 0 calls this.

    After `patience_s` seconds it is left to `remove_leftovers`.
    """
    until = time.monotonic() + patience_s
    while draft.part.exists() and num_others(draft.part) < draft.num_ranks - 1:
        if time.monotonic() > until:
            return
        time.sleep(0.01)
    shutil.rmtree(draft.part, ignore_errors=True)


def _write_content(
    draft: Draft, experiment: Experiment, files: Sequence[str]
) -> dict[str, FileHash]:
    """Write the published form, or its configuration alone; the hashes of the weights' files by their names."""
    model, precision = experiment.model, experiment.training.precision
    if not experiment.checkpoint.publish:
        write_config(model, dtype_name_of(precision), draft.part, draft.roles)
        return {}
    tensors = SavedTensors.open(draft.part / STATE, files, model, precision)
    return write_published(
        tensors, model, draft.part, draft.folder, roles=draft.roles
    ) | write_padding(tensors, model, draft.part / PADDING, draft.folder)


def _write_index(
    part: Path, records: Sequence[RankRecord], index: StateIndex, hashes: Mapping[str, FileHash]
) -> None:
    """Write state.json; ranks that share a stream have equal histories of it."""
    whole = replace(
        index,
        amax_histories={s: h for each in records for s, h in each.amax_histories.items()},
        files={name: each["xxh3_128"] for name, each in hashes.items()},
    )
    write_index(part / STATE / STATE_INDEX, whole)


def _sync_all(draft: Draft, known: Mapping[str, FileHash]) -> None:
    """Write hashes.json, and wait until everything but the ranks' own files is on the disk, where those are already."""
    record_hashes(draft.part, iteration_of(draft.folder), known)
    state = draft.part / STATE
    own = (*draft.part.iterdir(), state / STATE_INDEX, draft.part)
    for path in own:
        if path.exists():
            sync(path)
