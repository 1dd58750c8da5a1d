"""One rank's ring of statistics, and the dossiers that its triggers and requests leave in the run folder.

All ranks decide together after each iteration; rank 0 writes dossier.json. A dossier that cannot be written is logged,
and training goes on.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantexp.capture.store.manifest import TokenList, finish_capture
from quantexp.errors import CaptureError
from quantexp.model.checkpoints import resumable
from quantexp.model.layout import Layout
from quantexp.runs.dossiers import (
    Dossier,
    Trigger,
    folder_of,
    read_dossiers,
    take_request,
    write_dossier,
)
from quantexp.runs.metrics import Metrics
from quantexp.runs.status import now
from quantexp.terminal.units import human_bytes
from quantexp.training.capture_hooks import own_samples
from quantexp.training.context import RunContext
from quantexp.training.log import LOG

if TYPE_CHECKING:
    from torch import Tensor

    from quantexp.extras.forensics.ring.store import RingRecorder
    from quantexp.extras.forensics.ring.triggers import Fired

#: How many times as far out as the last trigger one fires at once.
_FARTHER = 4.0


@dataclass(frozen=True)
class _Tokens:
    """A micro-batch of the ring."""

    iteration: int
    index: int
    samples: list[int]
    ids: Tensor


class Dossiers:
    """The ring and the dossiers of one rank."""

    def __init__(self, context: RunContext, text_of: Callable[[int], str]) -> None:
        """`text_of` gives the text of a token's id."""
        from quantexp.extras.forensics.ring.triggers import Triggers

        self.context, self._text_of = context, text_of
        self.experiment = context.experiment
        self._length = self.experiment.capture.ring or 0
        self._triggers = Triggers(self.experiment.capture.trigger)
        self._place = Layout.of(self.experiment).place(context.rank.rank)
        self._tokens: deque[_Tokens] = deque()
        #: The dossier that waits for the values of the next iteration.
        self._open: Dossier | None = None
        begun = 0 if context.start is None else context.start.iteration
        #: Dossiers of triggers, in the iterations that are not computed again.
        self._num_fired = sum(
            each.trigger is not Trigger.REQUEST and each.iteration <= begun
            for each in read_dossiers(context.run)
        )
        #: Up to this iteration, which the last dossier's ring reaches, only what lies `_FARTHER` out fires.
        self._quiet_until, self._last_deviations = 0, 0.0
        #: None before something is to be taken.
        self.recorder: RingRecorder | None = self._new_recorder() if self._length else None

    def _new_recorder(self) -> RingRecorder:
        from quantexp.capture.division import Holder
        from quantexp.extras.forensics.ring.store import RingRecorder, RingStore

        capture, rank = self.experiment.capture, self.context.rank
        store = RingStore(self._length, rank.rank, int(capture.queue_gb * 1e9), capture.store)
        return RingRecorder(
            capture,
            store,
            rank.rank,
            rank.world_size,
            self.experiment.model.num_layers,
            Holder.of(self.experiment, rank.rank),
        )

    @property
    def takes_values(self) -> bool:
        """Whether the values of the current iteration are taken."""
        return self.recorder is not None and self.recorder.takes_values

    def tokens(self, iteration: int, index: int, ids: Tensor) -> None:
        """Hold the tokens of a micro-batch, [B, T], with the ring's iterations and that after a dossier."""
        if self.recorder is None:
            return
        while self._tokens and self._tokens[0].iteration <= iteration - max(1, self._length):
            self._tokens.popleft()
        samples = own_samples(self.experiment, self._place, iteration, index, len(ids))
        if samples is not None:
            self._tokens.append(_Tokens(iteration, index, samples, ids))

    def after(self, metrics: Metrics) -> None:
        """End an iteration: complete an open dossier, and begin one if a trigger fires; every rank calls this."""
        from quantexp.training.megatron.collectives import any_rank, gather

        if self._open is not None:
            self._complete(self._open, metrics.iteration)
        own = self._fired(metrics)
        has_fired = own is not None
        if not (has_fired if self.context.rank.alone else any_rank(has_fired)):
            return
        fired = next(each for each in gather(own) if each is not None)
        self.context.requests.dossier = False
        if fired.trigger is not Trigger.REQUEST:
            self._num_fired += 1
            self._quiet_until = metrics.iteration + self._length
            self._last_deviations = fired.deviations
        self._begin(fired, metrics.iteration)

    def _fired(self, metrics: Metrics) -> Fired | None:
        """What this rank sees; a request comes first."""
        from quantexp.extras.forensics.ring.triggers import Fired

        fired = self._triggers.of_metrics(metrics)
        if self.recorder is not None and self._length:
            self.recorder.flush()
            if self.recorder.store.is_full:
                fired = fired or self._triggers.of_shares(self.recorder.store.iterations)
        is_requested = self.context.rank.leads and take_request(self.context.run)
        if is_requested or self.context.requests.dossier:
            return Fired(Trigger.REQUEST, "requested from outside")
        if fired is None or not self._length:
            return None
        is_quiet = metrics.iteration <= self._quiet_until
        is_quiet &= fired.deviations <= _FARTHER * self._last_deviations
        is_over = self._num_fired >= self.experiment.capture.trigger.most
        return None if is_quiet or is_over else fired

    def _begin(self, fired: Fired, iteration: int) -> None:
        """Write what is held, and ask for the values of the next iteration."""
        from quantexp.capture.names import start_timestamp
        from quantexp.training.megatron.collectives import gather

        context = self.context
        folder = folder_of(context.run, iteration)
        if context.rank.leads:
            LOG.warning(f"iteration {iteration}: {fired.words}; see {folder}")
            shutil.rmtree(folder, ignore_errors=True)  # of an iteration that is computed again
        timestamp, has_room = gather((start_timestamp(), self._has_room(iteration)))[0]
        if self.recorder is None:
            self.recorder = self._new_recorder()
        numbers = [each.number for each in self.recorder.store.iterations] if self._length else []
        is_written = False
        with self._logged(iteration):
            self.recorder.store.begin(folder)
            if numbers:
                self.recorder.store.dump(numbers[0])
            self._list_tokens(iteration)
            is_written = True
        if not all(gather(is_written)):
            return
        dossier = Dossier(
            iteration,
            now(),
            fired.trigger,
            fired.words,
            [numbers[0], numbers[-1]] if numbers else None,
            max((i for i in resumable(context.run) if i < iteration), default=None),
        )
        self._write(dossier)
        if has_room and iteration < self.experiment.training.last_iteration:
            self._open = dossier
            self.recorder.take_whole(iteration + 1, timestamp)

    def _has_room(self, iteration: int) -> bool:
        """Whether the disk of the run has twice the bytes of the next iteration's values."""
        from quantexp.extras.forensics.ring.price import dossier_bytes
        from quantexp.quant.precision import precision_map

        experiment, max_gb = self.experiment, self.experiment.capture.max_gb
        declared = precision_map(experiment.model, experiment.quant, iteration + 1)
        needed = dossier_bytes(experiment, declared)
        needed = needed if max_gb is None else min(needed, int(max_gb * 1e9))
        free = self._free_bytes()
        if free < 2 * needed:
            LOG.warning(
                f"the dossier of iteration {iteration} has no values: they take {human_bytes(needed)}, "
                f"and the disk has {human_bytes(free)} free"
            )
        return free >= 2 * needed

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.context.run.root).free

    def _complete(self, dossier: Dossier, iteration: int) -> None:
        """Write what is left of the values of the iteration after a dossier."""
        from quantexp.training.megatron.collectives import gather

        recorder = self.recorder
        assert recorder is not None
        self._open = None
        with self._logged(dossier.iteration):
            recorder.store.dump(iteration)
            self._list_tokens(iteration, only=iteration)
        sizes = gather((recorder.num_values, recorder.store.num_bytes))
        tensors, num_bytes = (sum(each) for each in zip(*sizes, strict=True))
        recorder.whole_iteration = None
        self._write(
            replace(dossier, whole_iteration=iteration, tensors=tensors, num_bytes=num_bytes)
        )

    def _list_tokens(self, iteration: int, only: int | None = None) -> None:
        """List the tokens held up to an iteration, or of one iteration only."""
        assert self.recorder is not None
        rank = self.context.rank.rank
        listing = TokenList(self.recorder.store.folder, rank, self._text_of)
        for each in self._tokens:
            if only in (None, each.iteration) and each.iteration <= iteration:
                listing.add(
                    each.iteration, each.index, self._place.data, each.samples, each.ids.tolist()
                )

    def _write(self, dossier: Dossier) -> None:
        if not self.context.rank.leads:
            return
        with self._logged(dossier.iteration):
            finish_capture(folder_of(self.context.run, dossier.iteration))
            write_dossier(self.context.run, dossier)
            self.context.status.dossiers = [d.iteration for d in read_dossiers(self.context.run)]

    @contextlib.contextmanager
    def _logged(self, iteration: int) -> Iterator[None]:
        try:
            yield
        except (CaptureError, OSError) as error:
            LOG.warning(f"the dossier of iteration {iteration} is not complete: {error}")

    def close(self) -> None:
        """End the background work."""
        if self.recorder is not None:
            self.recorder.store.close()
