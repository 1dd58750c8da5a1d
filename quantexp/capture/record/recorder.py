"""Records tensors from the modules' hooks: the selected iterations, micro-batches and tensors, each once.

A recomputed forward pass calls the hooks a second time inside the backward pass; these calls are ignored. A weight is
stored once in an iteration; the backward's line refers to the forward's file. Of several ranks the first one that holds
a tensor keeps it, and of a divided tensor each rank its part (`quantexp.capture.division`); their counters interleave.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.capture.division import Holder
from quantexp.capture.names import TensorName, quant_type, start_timestamp
from quantexp.capture.operands import is_replaced
from quantexp.capture.parts import Part
from quantexp.capture.record.progress import Progress
from quantexp.capture.select.choice import sample_of, takes_micro_batch
from quantexp.capture.select.rules import Take, take
from quantexp.capture.statistics.fidelity import Chosen, Scoring
from quantexp.capture.statistics.summary import Summary, summarise
from quantexp.capture.store.deferred import Deferred, deferred
from quantexp.capture.store.files import Stored
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.kept import NOTHING, Kept
from quantexp.capture.store.metadata import BEFORE, About, Describer
from quantexp.errors import CaptureError
from quantexp.formats import Format
from quantexp.formats.torch_internals import in_backward, without_torch_function
from quantexp.model.layout import Layout
from quantexp.quant.hooks import FORWARD, TensorHook
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.schema import CaptureConfig, CaptureLevel

LOG = logging.getLogger(__name__)

#: Minimum seconds between two progress reports.
_REPORT_S = 0.05


@dataclass(frozen=True)
class _Weight:
    """The recorded weight of a module: its iteration, and its file if its values are stored."""

    iteration: int
    stored: Stored | None = None
    about: About | None = None


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
        iterations: Collection[int] = (1,),
        num_layers: int = 1,
        holder: Holder | None = None,
        before: Kept = NOTHING,
        formats: Mapping[str, Format] | None = None,
        scores_scheme: bool = False,
    ) -> None:
        """`holder` says which parts of tensors this rank holds; None means whole ones, of its own micro-batches.

        `before` is what it captured up to the checkpoint that its run goes on from, `formats` are the scheme's own.
        With `scores_scheme`, statistics score a tensor in its format in the scheme, unless `capture.format` is set.
        """
        self._scoring = Scoring(config.format, formats, of_scheme=scores_scheme)
        self.config, self.store, self.rank = config, store, rank
        store.num_bytes = before.num_bytes
        layout = Layout(data=world_size)
        self.holder = holder or Holder(layout, layout.place(rank), num_query_groups=1)
        self.iterations, self._num_layers = iterations, num_layers
        self.on_progress, self.tensors = on_progress, before.tensors
        self._world_size = world_size
        self._timestamp = timestamp or start_timestamp()
        self._counter = before.next_number or rank + 1
        #: The current iteration.
        self.iteration = -1
        self._is_captured = False
        #: This rank's share of the budget.
        self._most_bytes = None if config.max_gb is None else config.max_gb * 1e9 / world_size
        #: Why the capture has stopped; empty while it continues.
        self.stopped = ""
        self.on_statistics: Callable[[TensorName, Summary | Deferred], object] = lambda *_: None
        self._takes: dict[tuple[ModuleId, str, str], Take] = {}
        self._describer = Describer(rank)
        self._last_stored: Stored | None = None
        self._weights: dict[tuple[ModuleId, str], _Weight] = {}
        self._last_iteration = max(iterations, default=0)
        #: Pending statistics of tensors that the optimizer changes.
        self._changing: list[Deferred] = []
        self._latest: TensorName | None = None
        self._reported_s = 0.0

    def begin(
        self, iteration: int, micro_batch: int | None, loss_scale: float | None = None
    ) -> None:
        """Set the current iteration and micro-batch; None stands for the whole iteration."""
        self.iteration = iteration
        self._describer.begin(iteration, micro_batch, loss_scale)
        self._is_captured = self.captures(iteration) and (
            micro_batch is None or takes_micro_batch(self.config, micro_batch)
        )
        if iteration > self._last_iteration:
            self.store.memory.let_go()

    def hook(
        self,
        module: ModuleId,
        precision: Callable[[], ModulePrecision],
        about: Callable[[str], Mapping[str, object]],
    ) -> TensorHook:
        """The hook of one module. `about` returns more metadata of a tensor by its name (the softmax scale)."""
        self._describer.more[module] = about

        def look(operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
            if not self.passes(module, operation, name):
                return
            declared = precision()
            replaced = partial(is_replaced, declared, operation, name)
            kept = self.take(module, operation, name).unless_replaced(replaced)
            if kept.level is not CaptureLevel.off:
                self.record(module, declared, operation, phase, name, tensor)

        return look

    def passes(
        self, module: ModuleId, operation: str, tensor_name: str, alike: bool | None = None
    ) -> bool:
        """Whether the current tensor of a module is recorded: it is selected, and this is not a recomputation."""
        if not self._is_captured:
            return False
        recomputed = operation == FORWARD and in_backward()
        return not recomputed and self.wants(module, operation, tensor_name, alike)

    def captures(self, iteration: int) -> bool:
        """Whether this iteration is captured."""
        return iteration in self.iterations

    def record(
        self,
        module: ModuleId,
        precision: ModulePrecision,
        operation: str,
        phase: str,
        tensor_name: str,
        tensor: Tensor,
    ) -> None:
        """Record one tensor, as values or as statistics."""
        name = TensorName(
            module.layer, module.name, operation, phase, tensor_name, quant_type(precision)
        )
        with self.recording():
            if tensor_name == "weight":
                self._keep_weight(module, name, tensor, precision)
            else:
                self._keep(name, tensor, precision)

    def summary(
        self, tensor: Tensor, chosen: Chosen | None = None, name: str = ""
    ) -> Summary | Deferred:
        """A tensor's statistics, deferred if nothing changes the tensor before they are computed."""
        if name == "main_grad":  # the optimizer scales it right after the capture
            return summarise(tensor, chosen)
        pending = deferred(tensor, chosen)
        if name == "weight" and isinstance(pending, Deferred):
            self._changing.append(pending)
        return pending

    @property
    def is_capturing(self) -> bool:
        """Whether tensors of the current micro-batch are recorded."""
        return self._is_captured and not self.stopped

    def settle(self) -> None:
        """Compute before an optimizer step what is left of the weights' statistics, and send the pending batch."""
        changing, self._changing = self._changing, []
        if not self.stopped:
            with self.recording():
                self.store.settle(changing)
                self.store.send()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """The context of every recording: handles a full disk.

        It disables torch function modes, because the mode that makes a CPU stand in for a GPU would run at every call.
        """
        with self._stops_where_full(), without_torch_function():
            yield

    def flush(self) -> None:
        """Wait until all captured tensors are on disk.

        Raises:
            CaptureError: they cannot be written, and `capture.train_on_if_full` is false.
        """
        if not self.stopped:
            with self._stops_where_full():
                self.store.flush()
            self._report()

    def settled(self) -> list[Path]:
        """Wait, on another thread than the one that records, until all that was sent is written; the rank's lists.

        Raises:
            CaptureError: it cannot be written, and `capture.train_on_if_full` is false.
        """
        ignored = (CaptureError,) if self.config.train_on_if_full else ()
        with contextlib.suppress(*ignored):
            self.store.queue.flush()
        return self.store.lists()

    @contextlib.contextmanager
    def _stops_where_full(self) -> Iterator[None]:
        try:
            yield
        except CaptureError as error:
            if not self.config.train_on_if_full:
                raise
            self.stopped = (
                f"capture stopped in iteration {self.iteration}, training continues: {error}"
            )
            LOG.warning(self.stopped)
            self._latest = None
            self.store.memory.let_go()
            self._report()

    def wants(
        self, module: ModuleId, operation: str, tensor_name: str, alike: bool | None = None
    ) -> bool:
        """Whether the current tensor is selected and this rank stores it; `alike` is as for `Holder.stores`."""
        return (
            self._is_captured
            and not self.stopped
            and self.take(module, operation, tensor_name).level is not CaptureLevel.off
            and self.holder.stores(module.name, tensor_name, alike)
        )

    def take(self, module: ModuleId, operation: str, tensor_name: str) -> Take:
        """The captured part of a tensor."""
        key = (module, operation, tensor_name)
        if key not in self._takes:
            self._takes[key] = take(self.config, self._num_layers, *key)
        return self._takes[key]

    def _keep(self, name: TensorName, tensor: Tensor, precision: ModulePrecision) -> About:
        summary = self.summary(tensor, self.chosen(name, precision, tensor.ndim), name.tensor)
        taken = self.take(precision.module, name.operation, name.tensor)
        part = self.holder.part(name.module, name.tensor, tuple(tensor.shape))
        sample = sample_of(part.whole, name.tensor, taken.sample_of, taken.sample_count)
        return self.keep(name, precision, tensor, summary, taken, part, sample)

    def keep(
        self,
        name: TensorName,
        precision: ModulePrecision,
        tensor: Tensor,
        statistics: Summary | Deferred,
        taken: Take,
        part: Part,
        sample: dict[str, Any] | None,
        more: Mapping[str, object] = BEFORE,
    ) -> About:
        """Record a tensor's statistics and, if selected, its values or a sample of them; returns its metadata.

        `part` is the tensor's place in the whole one, which `sample` refers to; `more` is additional metadata that says
        which values these are.
        """
        self._last_stored = None
        is_stored = taken.level is CaptureLevel.tensors
        if is_stored and sample is not None:
            positions = part.positions(sample["axis"], sample["indices"])
            index = torch.tensor(positions, dtype=torch.int64, device=tensor.device)
            tensor = tensor.detach().index_select(sample["axis"], index)
            more, part = {**more, "sample": sample}, part.sampled(sample)
        more = {**more, **self.holder.metadata(name.module, part)}
        about = self._describer.about(name, precision, tensor, statistics, more)
        if is_stored:
            self._store(name, tensor, about)
        self.store.add_statistics(about)
        self.on_statistics(name, statistics)
        self._progress(name)
        return about

    def _store(self, name: TensorName, tensor: Tensor, about: About) -> None:
        """Store the values; over the budget, only a manifest line with the reason."""
        num_bytes = tensor.numel() * tensor.element_size()
        if self._most_bytes is not None and self.store.num_bytes + num_bytes > self._most_bytes:
            reason = f"over capture.max_gb={self.config.max_gb:g}"
            self.store.leave_out(about.with_more(left_out=reason))
            return
        self.store.add(name.file(self._timestamp, self._counter), tensor, about)
        self._counter += self._world_size
        self._last_stored = self.store.last

    def _keep_weight(
        self, module: ModuleId, name: TensorName, tensor: Tensor, precision: ModulePrecision
    ) -> None:
        """Record a weight once in an iteration and operation; the backward's line refers to the forward's file."""
        key = (module, name.operation)
        if self._weights.get(key, _Weight(-1)).iteration == self.iteration:
            return
        forward = self._weights.get((module, FORWARD), _Weight(-1))
        if name.operation == FORWARD or forward.iteration != self.iteration:
            about = self._keep(name, tensor, precision)
            self._weights[key] = _Weight(self.iteration, self._last_stored, about)
            return
        if forward.stored is not None:
            assert forward.about is not None
            about = forward.about.with_more(operation=name.operation, phase=name.phase)
            self.store.refer(forward.stored, about)
        self._weights[key] = forward

    def _progress(self, name: TensorName) -> None:
        self.tensors += 1
        self._latest = name
        if time.perf_counter() - self._reported_s >= _REPORT_S:
            self._report()

    def _report(self) -> None:
        self._reported_s = time.perf_counter()
        store, name = self.store, self._latest
        current = "" if name is None else f"{name.layer_idx} {name.operation} {name.tensor}"
        queue, rate = store.queue, store.bytes_per_s
        waits = queue.num_bytes, rate, queue.waited_s
        self.on_progress(Progress(self.tensors, store.num_bytes, current, self.stopped, *waits))

    def chosen(self, name: TensorName, precision: ModulePrecision, ndim: int) -> Chosen | None:
        """The format that the statistics of a tensor of `ndim` dimensions score."""
        return self._scoring.chosen(name, precision, ndim)
