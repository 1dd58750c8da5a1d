"""Connects captures to the hooks of a rank's parts of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from quantexp.training.tensor_metadata import metadata_of

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from torch import Tensor

    from quantexp.capture.record.recorder import Recorder
    from quantexp.quant.hooks import TensorHook
    from quantexp.quant.precision import ModuleId
    from quantexp.schema import Experiment
    from quantexp.training.megatron.watched import Watched


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
