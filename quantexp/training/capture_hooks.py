"""Connects captures to the hooks of a rank's parts of the model, and gives each captured tensor its metadata.

Importing this module imports no torch. The metadata of an expert's tensors says of their rows:

    row_sequences   the sequence of each row
    row_sources     for each micro-batch that the rows are from, slot -> what its operand depends on: seed and offset of
                    random numbers, random signs; present where several micro-batches draw their own

Each of several micro-batches has equally many successive sequences. Of the ranks that share a micro-batch, one lists
its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantexp.capture.select.choice import takes_micro_batch
from quantexp.capture.select.schedule import captured_iterations
from quantexp.capture.store.manifest import TokenList
from quantexp.model.layout import Layout, Place
from quantexp.schema import AttentionPath, CaptureLevel, Experiment

if TYPE_CHECKING:
    from pathlib import Path

    from megatron.core.models.gpt.gpt_model import GPTModel
    from torch import Tensor

    from quantexp.capture.record.recorder import Recorder
    from quantexp.quant.hooks import TensorHook
    from quantexp.quant.precision import ModuleId, ModulePrecision
    from quantexp.quant.rows import Rows
    from quantexp.schema import Experiment
    from quantexp.training.megatron.watched import Watched


#: Tensors of a linear layer with one row per token.
_BY_TOKEN = frozenset({"input", "output", "grad_output", "grad_input"})
#: Attention tensors whose metadata includes the mask.
_MASKED = frozenset({"query", "attn_weights", "exp_scores"})


class CaptureHooks:
    """The recorders of a rank, each of which receives every tensor of the modules."""

    def __init__(
        self, experiment: Experiment, watched: Watched, chunks: Sequence[GPTModel]
    ) -> None:
        self.experiment, self.watched, self.chunks = experiment, watched, chunks
        self._recorders: list[Recorder] = []

    def add(self, recorder: Recorder) -> None:
        """Connect one more recorder."""
        from quantexp.training.megatron.attention import SchemeAttention

        self._recorders.append(recorder)
        for chunk in self.chunks:
            self._hook_unquantised_modules(chunk, recorder)
        for name, module in self.watched.modules.items():
            hooks = [self._hook(each, name) for each in self._recorders]
            module.hook = hooks[0] if len(hooks) == 1 else _all_of(hooks)
            if isinstance(module, SchemeAttention):
                module.wants = partial(self._any_passes, name)

    def _hook(self, recorder: Recorder, name: ModuleId) -> TensorHook:
        module = self.watched.modules[name]
        return recorder.hook(name, lambda: module.precision, partial(metadata_of, module))

    def _any_passes(self, name: ModuleId, operation: str, tensor: str) -> bool:
        return any(recorder.passes(name, operation, tensor) for recorder in self._recorders)

    def _hook_unquantised_modules(self, model: GPTModel, recorder: Recorder) -> None:
        """Connect a capture to the residual stream and the routers of the layers to be captured."""
        from quantexp.capture.names import RESIDUAL, ROUTER
        from quantexp.capture.select.choice import expected_tensors
        from quantexp.quant.precision import ModuleId
        from quantexp.training.megatron.experts import moe_layers, watch_router
        from quantexp.training.megatron.residual import watch_residual

        experiment = replace(self.experiment, capture=recorder.config)
        expected = {each.module for each in expected_tensors(experiment)}
        for layer in model.decoder.layers:
            module = ModuleId(layer.layer_number - 1, RESIDUAL)
            if module in expected:
                watch_residual(layer, module.layer == 0, _plain_hook(recorder, module))
        for index, moe in moe_layers(model).items():
            module = ModuleId(index, ROUTER)
            if module in expected:
                watch_router(moe, _plain_hook(recorder, module))


def _plain_hook(recorder: Recorder, module: ModuleId) -> TensorHook:
    """The hook of a module that no scheme quantises."""
    from quantexp.quant.precision import ModulePrecision

    return recorder.hook(module, lambda: ModulePrecision(module, {}), partial(metadata_of, None))


def _all_of(hooks: Sequence[TensorHook]) -> TensorHook:
    def call_all(operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
        for hook in hooks:
            hook(operation, phase, name, tensor)

    return call_all


def metadata_of(module: object, tensor: str) -> dict[str, object]:
    """The metadata of a module's tensor, without its formats."""
    # Not getattr for each: torch searches three more places for a missing attribute.
    attributes: dict[str, Any] = getattr(module, "__dict__", {})
    metadata: dict[str, object] = {"softmax_scale": attributes.get("softmax_scale")}
    path = attributes.get("path", AttentionPath.plain)
    if path is not AttentionPath.plain:
        metadata["attention"] = path.value
    rows: Rows | None = attributes.get("rows")
    if rows is not None and tensor in _BY_TOKEN:
        metadata |= row_metadata(attributes["precision"], rows)
    mask: Tensor | None = attributes.get("mask")
    if mask is not None and tensor in _MASKED:
        from quantexp.quant.attention.documents import document_starts

        metadata["document_starts"] = document_starts(mask)
    return metadata


def row_metadata(precision: ModulePrecision, rows: Rows) -> dict[str, object]:
    """The metadata of a tensor with one row for each of an expert's tokens."""
    from quantexp.capture.operands import slot_key
    from quantexp.quant.sources import as_source
    from quantexp.quant.step_state import current_state

    metadata: dict[str, object] = {"row_sequences": rows.sequence.tolist()}
    drawn = {
        slot_key(slot): spec
        for slot, spec in precision.slots.items()
        if spec.needs_step_state and current_state().draws_again(spec)
    }
    if rows.num_sources == 1 or not drawn:
        return metadata
    sources = []
    for source in range(rows.num_sources):
        with as_source(rows, source):
            sources.append({key: current_state().record(spec) for key, spec in drawn.items()})
    return {**metadata, "row_sources": sources}


def own_samples(
    experiment: Experiment, place: Place, iteration: int, index: int, count: int
) -> list[int] | None:
    """The samples, from 0 in the run's order, of a rank's micro-batch `index`; None if another rank lists them."""
    if not place.tensor == place.context == place.pipeline == 0:
        return None
    training, layout = experiment.training, Layout.of(experiment)
    first = (iteration - 1) * training.global_batch_size
    first += (index * layout.data + place.data) * training.micro_batch_size
    return list(range(first, first + count))


class TokenRecorder:
    """Lists the tokens where a run captures values."""

    def __init__(
        self, experiment: Experiment, folder: Path, rank: int, text_of: Callable[[int], str]
    ) -> None:
        """Take a run; `text_of` is the text of a token id."""
        self._experiment, self._capture = experiment, experiment.capture
        self._place = Layout.of(experiment).place(rank)
        iterations = captured_iterations(self._capture, experiment.training.last_iteration)
        self._iterations = frozenset(iterations)
        self._list = TokenList(folder, rank, text_of)

    def add(self, iteration: int, index: int, tokens: Tensor) -> None:
        """List micro-batch `index` of this rank, ids [B, T], if its values are captured.

        Raises:
            CaptureError: the list cannot be written.
        """
        if not self._is_captured(iteration, index):
            return
        samples = own_samples(self._experiment, self._place, iteration, index, len(tokens))
        if samples is not None:
            self._list.add(iteration, index, self._place.data, samples, tokens.tolist())

    def _is_captured(self, iteration: int, index: int) -> bool:
        return (
            self._capture.level is CaptureLevel.tensors
            and iteration in self._iterations
            and takes_micro_batch(self._capture, index)
        )
