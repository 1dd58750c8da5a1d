"""The predicted peak of forward and backward against the tensors alive at it.

Attention's softmax determines the peak here: T tokens, H heads, H T^2 scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quantexp.memory.activations import activation_bytes, passing_bytes
from quantexp.schema import Experiment
from tests.memory.small_models import losses_of, model_of

Tiny = Callable[..., Experiment]
T, H = 1024, 4


class LiveTensors(TorchDispatchMode):
    """Follows the storages that operators allocate, and remembers those alive when they took most bytes.

    A kernel's own temporaries are not seen. `like_cuda` adds that of `softmax_backward_cuda`, the product of the
    gradient and the result (ATen/native/cuda/SoftMax.cu), which the CPU's kernel keeps in registers.
    """

    def __init__(self, *, like_cuda: bool) -> None:
        super().__init__()
        self.like_cuda = like_cuda
        #: Bytes of the storages alive at the peak.
        self.at_peak: list[int] = []
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        is_softmax = func is torch.ops.aten._softmax_backward_data.default
        product = [torch.empty_like(args[0])] if self.like_cuda and is_softmax else []
        for result in [*tree_leaves(results), *product]:
            if isinstance(result, Tensor):
                self._add(result.untyped_storage())
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, key)
        if sum(self._live.values()) > sum(self.at_peak):
            self.at_peak = list(self._live.values())


def alive_at_peak(experiment: Experiment, *, like_cuda: bool) -> list[int]:
    """Bytes of each storage besides the weights; gradients of weights are freed at once, as training frees them."""
    with model_of(experiment) as model:
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None))
        weights = {w.untyped_storage()._cdata for w in model.parameters()}
        live = LiveTensors(like_cuda=like_cuda)
        live._live = dict.fromkeys(weights, 0)
        with live:
            losses_of(model, experiment.training).mean().backward()
        return live.at_peak


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    ("precision", "like_cuda", "scores"),
    [
        # Of two layers: P of both in float32 and that of the first in bf16, dP, dS; on a GPU also their product.
        ("bf16", True, [4, 4, 4, 4, 4, 2]),
        # The forward pass: P of both layers in both dtypes, and S in both.
        ("bf16", False, [4, 4, 4, 2, 2, 2]),
        # P of both layers, dP, dS and, on a GPU, their product; or P of the first and four copies of dS.
        ("fp32", True, [4, 4, 4, 4, 4]),
        ("fp32", False, [4, 4, 4, 4, 4]),
    ],
)
def test_predicted_peak_is_that_of_the_tensors_alive(
    tiny: Tiny, precision: str, like_cuda: bool, scores: list[int], recompute: str
) -> None:
    experiment = tiny(
        f"training.seq_length={T}",
        "training.micro_batch_size=1",
        "training.global_batch_size=1",
        f"training.precision={precision}",
        f"training.recompute={recompute}",
    )
    alive = alive_at_peak(experiment, like_cuda=like_cuda)
    model, training = experiment.model, experiment.training
    # The norms that ran are those of a CPU. Rotary tables and tokens are not counted.
    predicted = activation_bytes(model, training, is_cpu=True)
    predicted += passing_bytes(model, training, is_cpu=not like_cuda)
    assert 0.998 * sum(alive) <= predicted <= 1.1 * sum(alive)
    if recompute == "none":
        whole = sorted((n // (H * T * T) for n in alive if n >= 2 * H * T * T), reverse=True)
        assert whole == scores
