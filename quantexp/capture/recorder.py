"""From the modules' taps to the store: the right iterations, micro-batches and tensors, each once.

A recomputed forward pass passes its taps a second time inside the backward and is left out. A weight is stored once an
iteration; the backward's line refers to the forward's file. Where several ranks share a batch, what they all hold alike
(weights, reduced gradients) is rank 0's to keep, and the counters of their files interleave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from quantexp.capture.choice import is_captured, takes_micro_batch, wanted
from quantexp.capture.names import TensorName, formats_record, quant_type
from quantexp.capture.statistics import statistics
from quantexp.capture.store import CaptureStore, Stored
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.tap import FORWARD, Tap
from quantexp.schema import CaptureConfig, CaptureLevel

#: Tensors that are the same on every rank that shares a batch.
ALIKE = frozenset({"weight", "main_grad"})


def start_timestamp() -> str:
    """The time as the names of a run's files begin with it."""
    return datetime.now(UTC).strftime("%Y%m%d_%H%M%S")


@dataclass(frozen=True)
class Progress:
    """What has been captured so far."""

    tensors: int
    num_bytes: int
    #: The tensor captured last, as `L0-fc1 forward input`.
    current: str


@dataclass(frozen=True)
class _Weight:
    """A module's weight as it was kept: in which iteration, in which file if in any."""

    iteration: int
    stored: Stored | None = None
    statistics: dict[str, Any] | None = None


class Recorder:
    """One rank's capture."""

    def __init__(
        self,
        config: CaptureConfig,
        store: CaptureStore,
        rank: int,
        on_progress: Callable[[Progress], None],
        world_size: int = 1,
        timestamp: str | None = None,
    ) -> None:
        self.config, self.store, self.rank = config, store, rank
        self.on_progress = on_progress
        self.tensors = 0
        self._world_size = world_size
        self._timestamp = timestamp or start_timestamp()
        self._counter = rank + 1
        self._iteration = -1
        self._micro_batch: int | None = None
        self._loss_scale: float | None = None
        self._weights: dict[tuple[ModuleId, str], _Weight] = {}
        self.seconds = 0.0

    def begin(
        self, iteration: int, micro_batch: int | None, loss_scale: float | None = None
    ) -> None:
        """Whatever passes from now on belongs to this micro-batch; None is the whole iteration."""
        self._iteration, self._micro_batch = iteration, micro_batch
        self._loss_scale = loss_scale

    def tap(
        self,
        module: ModuleId,
        precision: Callable[[], ModulePrecision],
        constants: Mapping[str, object],
    ) -> Tap:
        """The tap of one module. `constants` (the softmax scale) join its metadata."""

        def look(operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
            recomputed = operation == FORWARD and torch._C._current_autograd_node() is not None
            if recomputed or not self.wants(name):
                return
            self.record(module, precision(), operation, phase, name, tensor, constants)

        return look

    def captures(self, iteration: int) -> bool:
        """Whether an iteration is captured."""
        return is_captured(self.config, iteration)

    def record(
        self,
        module: ModuleId,
        precision: ModulePrecision,
        operation: str,
        phase: str,
        tensor_name: str,
        tensor: Tensor,
        constants: Mapping[str, object],
    ) -> None:
        """Keep one tensor, as full values or as statistics."""
        start = time.perf_counter()
        name = TensorName(
            module.layer, module.name, operation, phase, tensor_name, quant_type(precision)
        )
        if tensor_name == "weight":
            self._keep_weight(module, name, tensor, precision, constants)
        else:
            self._keep(name, tensor, self._metadata(name, precision, tensor, constants))
        self.seconds += time.perf_counter() - start

    def wants(self, tensor_name: str) -> bool:
        """Whether a tensor of this name that passes now is kept."""
        return (
            self.captures(self._iteration)
            and (self._micro_batch is None or takes_micro_batch(self.config, self._micro_batch))
            and wanted(self.config, tensor_name)
            and (self.rank == 0 or tensor_name not in ALIKE)
        )

    def _keep(self, name: TensorName, tensor: Tensor, metadata: dict[str, Any]) -> None:
        if self.config.level is CaptureLevel.tensors:
            self.store.add(name.file(self._timestamp, self._counter), tensor, metadata)
            self._counter += self._world_size
        self.store.add_statistics(metadata)
        self._progress(name)

    def _keep_weight(
        self,
        module: ModuleId,
        name: TensorName,
        tensor: Tensor,
        precision: ModulePrecision,
        constants: Mapping[str, object],
    ) -> None:
        """Once an iteration and operation; the backward's line refers to the forward's file."""
        key = (module, name.operation)
        if self._weights.get(key, _Weight(-1)).iteration == self._iteration:
            return
        forward = self._weights.get((module, FORWARD), _Weight(-1))
        if name.operation == FORWARD or forward.iteration != self._iteration:
            metadata = self._metadata(name, precision, tensor, constants)
            self._keep(name, tensor, metadata)
            self._weights[key] = _Weight(self._iteration, self.store.last, metadata["statistics"])
            return
        metadata = self._metadata(name, precision, tensor, constants, forward.statistics)
        if forward.stored is not None:
            self.store.refer(forward.stored, metadata)
        self._weights[key] = forward

    def _progress(self, name: TensorName) -> None:
        self.tensors += 1
        current = f"{name.layer_idx} {name.operation} {name.tensor}"
        self.on_progress(Progress(self.tensors, self.store.num_bytes, current))

    def _metadata(
        self,
        name: TensorName,
        precision: ModulePrecision,
        tensor: Tensor,
        constants: Mapping[str, object],
        known_statistics: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "module": name.module,
            "layer": name.layer,
            "layer_type": name.layer_type,
            "operation": name.operation,
            "phase": name.phase,
            "component": name.component,
            "quant_type": name.quant_type,
            "tensor": name.tensor,
            "iteration": self._iteration,
            "micro_batch": self._micro_batch,
            "rank": self.rank,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "loss_scale": self._loss_scale,
            **constants,
            "formats": formats_record(precision),
            "statistics": known_statistics or statistics(tensor),
        }
