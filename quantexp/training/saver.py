"""Saves checkpoints: training waits for a copy in host memory, a background thread of each rank writes the rest.

    training thread     awaits the save before, copies what this rank writes, goes on
    background          writes it, then its record; rank 0 awaits all records and completes the checkpoint
                        (`quantexp.model.checkpoint_writer`), then removes those that are not to stay

The background sends no messages, so it cannot disturb the order of training's collectives. Its error is raised by the
next `save`, or by `finish`. With `checkpoint.asynchronous=false` training waits, and one tensor is copied at a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantexp.capture.store.queue import HostMemory, WorkQueue, host_copy
from quantexp.config.start_point import first_weights
from quantexp.errors import EngagementError, RunError
from quantexp.folders import user_path
from quantexp.model.checkpoint_writer import (
    Draft,
    complete,
    discard,
    new_token,
    remove_leftovers,
    write_part,
)
from quantexp.model.checkpoints import STATE, folder_of, remove_others
from quantexp.model.huggingface.token_roles import TokenRoles, token_roles
from quantexp.model.layout import Layout
from quantexp.model.pieces import Piece
from quantexp.model.rank_records import RankRecord, await_records, write_record
from quantexp.model.training_state import StateIndex, rank_file
from quantexp.proof.saved_state import Elements, num_not_written
from quantexp.runs.disk import first_line
from quantexp.runs.fencing import require_ours
from quantexp.runs.status import Phase
from quantexp.training.context import RunContext
from quantexp.training.log import LOG
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.state_shards import RankState, index_of, weights_of

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from torch import Tensor

#: Seconds that rank 0 waits for the records of other ranks after training has ended, or a part has failed.
GRACE_S = 5.0
#: Seconds of waiting for the save before that are logged.
_LOGGED_S = 1.0


@dataclass(frozen=True)
class _Save:
    """What the background of one rank works on."""

    draft: Draft
    #: By name in the file; each waits for its copy.
    copies: Mapping[str, Callable[[], Tensor]]
    pieces: Mapping[str, Piece]
    #: Of state.json, without what the records say; with this rank's amax histories.
    index: StateIndex
    settled: Callable[[], None]
    #: What the file is compared with.
    seen: Elements


def make_saver(context: RunContext) -> CheckpointSaver:
    """The saver of a rank; every rank calls this, inside `session`.

    Rank 0 removes what earlier starts left before any rank may write: all receive its token afterwards.
    """
    if context.rank.leads:
        remove_leftovers(context.run.checkpoints)
    return CheckpointSaver(context, gather(new_token())[0])


def _roles_of(context: RunContext) -> TokenRoles:
    """Those of the checkpoint that the run goes on from, or of what it started from."""
    own, published = context.start, context.experiment.model.from_hf
    return token_roles(
        None if own is None else own.weights,
        first_weights(context.experiment),
        None if published is None else user_path(published),
    )


class CheckpointSaver:
    """The saver of one rank (see `quantexp.training.megatron.callbacks.Saver`)."""

    def __init__(self, context: RunContext, token: str) -> None:
        self.context, self.token = context, token
        self.experiment, self.layout = context.experiment, Layout.of(context.experiment)
        #: Called in the training thread at a save; what it returns is called before this rank's record is written, and
        #: waits until all else that belongs to the checkpoint is on the disk.
        self.settle: Callable[[], Callable[[], None]] = lambda: lambda: None
        #: Seconds from the beginning of the last save until its checkpoint was whole; 0 before the first.
        self.last_s = 0.0
        self._memory = HostMemory(sys.maxsize)
        self._queue: WorkQueue[_Save] = WorkQueue(0, self._write, "checkpoint")
        self._has_saved = False
        #: When the background stops waiting for other ranks.
        self._until: float | None = None
        self._roles = _roles_of(context) if context.rank.leads else TokenRoles()

    def save(
        self,
        iteration: int,
        chunks: Sequence[GPTModel],
        state: Callable[[], RankState],
        nonfinite: int,
        seen: Callable[[int], Elements] = lambda _: {},
    ) -> None:
        """Save a checkpoint; see `Saver.save`."""
        self.context.requests.saved()
        waits = not (self.experiment.checkpoint.asynchronous and self._queue.is_idle)
        if waits:
            self.context.set_phase(Phase.SAVING)
        self._has_saved = True
        self._await_earlier()
        if self.experiment.checkpoint.optimizer:
            content = state()
        else:
            content = weights_of(chunks, self.experiment.model, self.layout, self.context.rank.rank)
        folder = folder_of(self.context.run, iteration)
        save = _Save(
            Draft(folder, self.token, self.layout.num_processes, self._roles),
            {name: self._copy(tensor) for name, tensor in content.named_tensors()},
            {name: each.piece for name, each in content.pieces.items()},
            index_of(content, iteration, self.layout, nonfinite),
            self.settle(),
            seen(iteration) if self.experiment.checkpoint.optimizer else {},
        )
        self._queue.put(save)
        if not self.experiment.checkpoint.asynchronous:
            self._queue.flush()
        if waits:
            self.context.set_phase(Phase.TRAINING)

    def finish(self) -> None:
        """Wait until the last checkpoint is whole; see `Saver.finish`."""
        if not self._has_saved:
            return
        self.context.set_phase(Phase.SAVING)
        try:
            self._await_earlier()
        except Exception as error:
            self._agree(first_line(error))
            raise
        self._agree(None)

    def _agree(self, words: str | None) -> None:
        """Raise the first rank's error on all that have none, so that all ranks end with the same reason."""
        others = [] if self.context.rank.alone else gather(words)
        if words is None and (errors := [each for each in others if each is not None]):
            raise RunError(errors[0])

    def close(self) -> None:
        """End the background, however training ended; what other ranks do not complete soon is given up."""
        self._until = time.monotonic() + GRACE_S
        self._queue.close()

    def _await_earlier(self) -> None:
        start = time.monotonic()
        self._queue.flush()
        if (waited := time.monotonic() - start) > _LOGGED_S:
            LOG.info(f"waited {waited:.1f} s until the checkpoint before was written")

    def _copy(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start the copy of a tensor; where training waits, it is written from where it is."""
        is_copied = self.experiment.checkpoint.asynchronous
        return host_copy(tensor, self._memory) if is_copied else tensor.detach

    def _write(self, save: _Save) -> None:
        """Write this rank's part and record, and on rank 0 the checkpoint; runs in the background."""
        start = time.monotonic()
        tensors = {name: copied() for name, copied in save.copies.items()}
        try:
            self._write_part(save, tensors)
            if self.context.rank.leads:
                self._complete(save)
            self.last_s = time.monotonic() - start
        except Exception as error:  # training raises it later, unless another error ends it before
            LOG.error(first_line(error))
            raise
        finally:
            if self.experiment.checkpoint.asynchronous:
                for tensor in tensors.values():
                    self._memory.give_back(tensor)

    def _write_part(self, save: _Save, tensors: Mapping[str, Tensor]) -> None:
        rank, histories = self.context.rank.rank, save.index.amax_histories
        try:
            hashes = write_part(save.draft, rank, tensors, save.pieces, histories)
            _require_written(save, rank)
            save.settled()
            record = RankRecord(None, hashes, histories)
            write_record(save.draft.part, rank, record)
        except Exception as error:
            with suppress(OSError):  # the disk may be full
                write_record(save.draft.part, rank, RankRecord(first_line(error)))
            if self.context.rank.leads:
                discard(save.draft, GRACE_S)
            raise

    def _complete(self, save: _Save) -> None:
        run, draft = self.context.run, save.draft
        try:
            records = await_records(draft.part, draft.num_ranks, self._is_abandoned)
        except Exception:
            discard(draft, GRACE_S if self._until is None else 0.0)
            raise
        complete(draft, self.experiment, records, save.index, lambda: require_ours(run))
        LOG.info(f"saved iteration {save.index.iteration}")
        try:
            remove_others(run, self.experiment.checkpoint, save.index.iteration)
        except OSError as error:  # training goes on while the disk has room
            LOG.warning(f"an old checkpoint was not removed: {error}")

    def _is_abandoned(self) -> bool:
        return self._until is not None and time.monotonic() > self._until


def _require_written(save: _Save, rank: int) -> None:
    """Read elements of a rank's file back.

    Raises:
        EngagementError: names tensors of which the rank held others.
    """
    if not save.seen:
        return
    wrong = num_not_written(save.draft.part / STATE / rank_file(rank), save.seen)
    if wrong:
        words = [f"{number} drawn elements of {name}" for name, number in wrong.items()]
        more = f" and {len(words) - 3} more" if len(words) > 3 else ""
        raise EngagementError(
            f"the checkpoint of iteration {save.index.iteration} is not what rank {rank} held: "
            f"{'; '.join(words[:3])}{more}"
        )
