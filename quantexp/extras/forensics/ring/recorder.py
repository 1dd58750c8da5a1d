"""Records the statistics of every iteration into a ring, and the values of single iterations into a dossier."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from quantexp.capture.division import Holder
from quantexp.capture.names import TensorName
from quantexp.capture.record.recorder import Recorder
from quantexp.capture.record.scored import OwnFormats
from quantexp.capture.select.rules import Take
from quantexp.capture.statistics.fidelity import Chosen
from quantexp.capture.store.metadata import About
from quantexp.extras.forensics.ring.price import ring_config
from quantexp.extras.forensics.ring.store import RingStore
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.schema import CaptureConfig, CaptureLevel


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
