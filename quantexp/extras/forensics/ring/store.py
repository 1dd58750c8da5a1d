"""Records the statistics of every iteration into a ring, and the values of single iterations into a dossier.

The store holds the statistics of the last iterations in memory, and writes them when it is told to. They are computed
in the background thread, as those that are written at once. Values are written into the folder of the current dossier.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quantexp.capture.division import Holder
from quantexp.capture.names import TensorName, place
from quantexp.capture.record.recorder import Recorder
from quantexp.capture.select.rules import Take
from quantexp.capture.statistics.fidelity import Chosen, OwnFormats
from quantexp.capture.statistics.summary import Summary
from quantexp.capture.store.deferred import Deferred, count_all
from quantexp.capture.store.folder import CaptureStore, Line
from quantexp.capture.store.manifest import STATISTICS
from quantexp.capture.store.metadata import About
from quantexp.extras.forensics.ring.price import ring_config
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.schema import CaptureConfig, CaptureLevel, StoreKind


@dataclass(frozen=True)
class TensorKey:
    """A tensor of a model, in any iteration and micro-batch."""

    layer: int
    module: str
    operation: str
    tensor: str

    def __str__(self) -> str:
        return f"{place(self.layer, self.module)} {self.tensor}"


@dataclass
class Iteration:
    """What is held of one iteration."""

    number: int
    tensors: list[About] = field(default_factory=list)
    #: Shares of saturated and of underflowed values, the largest of the micro-batches.
    saturated: dict[TensorKey, float] = field(default_factory=dict)
    underflow: dict[TensorKey, float] = field(default_factory=dict)


class RingStore(CaptureStore):
    """The store of a ring, which has no folder before the first dossier."""

    def __init__(self, length: int, rank: int, queue_bytes: int, kind: StoreKind) -> None:
        """`length` is the number of iterations that are held; 0 holds the last of those that are recorded."""
        self.length = length
        #: The oldest first.
        self.iterations: deque[Iteration] = deque(maxlen=max(1, length))
        self._access = threading.Lock()
        super().__init__(Path(), rank, queue_bytes, kind)

    @property
    def is_full(self) -> bool:
        """Whether as many iterations are held as may be."""
        return len(self.iterations) == self.iterations.maxlen

    def dump(self, first: int) -> None:
        """Write the statistics that are held, from this iteration on, into the folder; the ring keeps them.

        Raises:
            CaptureError: they cannot be written.
        """
        self.flush()
        with self._access:
            iterations = [each for each in self.iterations if each.number >= first]
        lines = [about.line() for iteration in iterations for about in iteration.tensors]
        self._append(STATISTICS, lines)

    def _write(self, batch: Sequence[Line]) -> None:
        count_all(line.about.deferred for line in batch if line.about.deferred is not None)
        for line in batch:
            if line.listing == STATISTICS:
                self._hold(line.about)
        if values := [line for line in batch if line.listing != STATISTICS]:
            super()._write(values)

    def _hold(self, about: About) -> None:
        """Keep a tensor's statistics, on the host; one that was changed before it was counted has none."""
        statistics = about.statistics
        if isinstance(statistics, Deferred) and statistics.changed:
            return
        metadata = about.made()
        if isinstance(statistics, Summary):
            statistics = statistics.on_host()
            metadata["statistics"] = statistics
        assert statistics is not None
        with self._access:
            self._of(metadata["iteration"]).tensors.append(About.of(metadata))
            self._note_shares(metadata, statistics)

    def _of(self, number: int) -> Iteration:
        if not self.iterations or self.iterations[-1].number != number:
            self.iterations.append(Iteration(number))
        return self.iterations[-1]

    def _note_shares(self, metadata: dict[str, Any], statistics: Summary | Deferred) -> None:
        shares = statistics.shares()
        if shares is None:
            return
        key = TensorKey(*(metadata[name] for name in ("layer", "module", "operation", "tensor")))
        iteration = self.iterations[-1]
        for of, share in zip((iteration.saturated, iteration.underflow), shares, strict=True):
            of[key] = max(share, of.get(key, 0.0))


class RingRecorder(Recorder):
    """One rank's ring. Its statistics score each tensor in the scheme's format (`OwnFormats`)."""

    store: RingStore

    def __init__(
        self,
        capture: CaptureConfig,
        store: RingStore,
        rank: int,
        world_size: int,
        num_layers: int,
        holder: Holder,
    ) -> None:
        super().__init__(
            ring_config(capture),
            store,
            rank,
            lambda progress: None,
            world_size,
            num_layers=num_layers,
            holder=holder,
        )
        #: The files with values of the current dossier.
        self.num_values = 0
        #: The iteration whose values are taken, if one is.
        self.whole_iteration: int | None = None
        self._scored = OwnFormats()

    @property
    def takes_values(self) -> bool:
        """Whether the values of the current iteration are taken."""
        return self.iteration == self.whole_iteration

    def take_whole(self, iteration: int, timestamp: str) -> None:
        """Take the values of an iteration into the store's folder; all ranks give the files the same timestamp."""
        self.store.num_bytes = self.num_values = 0
        self.whole_iteration, self._timestamp = iteration, timestamp

    def _store(self, name: TensorName, tensor: Tensor, about: About) -> None:
        super()._store(name, tensor, about)
        self.num_values += self._last_stored is not None

    def captures(self, iteration: int) -> bool:
        """Whether anything is taken of this iteration, from 1; nothing is of an evaluation, which has none."""
        return iteration > 0 and (self.store.length > 0 or iteration == self.whole_iteration)

    def take(self, module: ModuleId, operation: str, tensor_name: str) -> Take:
        """The taken part of a tensor: its statistics, or all of it."""
        taken = super().take(module, operation, tensor_name)
        if taken.level is CaptureLevel.tensors and self.iteration != self.whole_iteration:
            return replace(taken, level=CaptureLevel.stats)
        return taken

    def chosen(self, name: TensorName, precision: ModulePrecision, ndim: int) -> Chosen | None:
        """The format of the first product that quantises the tensor; else `capture.format`."""
        own = self._scored.chosen(name, precision, ndim)
        return own or super().chosen(name, precision, ndim)
