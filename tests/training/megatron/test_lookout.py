"""A step that is left out is repeated to find the first tensor that is not finite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from quantexp.quant.linear import dgrad as plain
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.schema import Experiment
from quantexp.training.megatron.session import session
from quantexp.training.megatron.trainer import train

from .test_trainer import RecordingObserver, tokens

Tiny = Callable[..., Experiment]


class WithWeight(RecordingObserver):
    """Makes one weight NaN before a micro-batch."""

    #: Iteration and micro-batch.
    at = (2, 0)

    def micro_batch(self, iteration: int, index: int, loss_scale: float | None) -> None:
        if (iteration, index) == self.at:
            with torch.no_grad():
                self.model.get_parameter("decoder.layers.1.mlp.linear_fc1.weight")[3, 5] = math.nan


@contextlib.contextmanager
def infinite_gradient_at(module: ModuleId) -> Iterator[None]:
    """The gradient that this module passes on is infinite in one element, from the third call on."""
    calls: list[int] = []

    def dgrad(precision: ModulePrecision, *args: Any, **kwargs: Any) -> Tensor:
        dx = plain(precision, *args, **kwargs)
        if precision.module == module:
            calls.append(0)
            if len(calls) > 2:
                dx.view(-1)[7] = math.inf
        return dx

    with mock.patch("quantexp.training.megatron.linear.dgrad", dgrad):
        yield


def trained(experiment: Experiment, observer: RecordingObserver) -> RecordingObserver:
    with session(experiment.training) as device, contextlib.suppress(Exception):
        train(experiment, tokens(experiment), observer, device)
    return observer


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_first_output_of_the_forward_pass_is_named(tiny: Tiny, recompute: str) -> None:
    experiment = tiny(
        "training.iterations=2", "training.global_batch_size=4", f"training.recompute={recompute}"
    )
    words = trained(experiment, WithWeight()).metrics[1].nonfinite
    assert words is not None
    assert words.startswith(
        "the loss of micro-batch 0 on rank 0 is nan; the first tensor that is not finite is the output of layer 1 fc1 "
        "(forward, micro-batch 0): 128 of "
    )
    assert words.endswith(" values are NaN or Inf, on rank 0")


def test_the_first_gradient_of_the_backward_pass_is_named(tiny: Tiny) -> None:
    experiment = tiny("training.iterations=2", "training.global_batch_size=4", "quant=linear_mxfp8")
    with infinite_gradient_at(ModuleId(0, "proj")):
        metrics = trained(experiment, RecordingObserver()).metrics
    assert not metrics[0].skipped
    assert (
        "; the first tensor that is not finite is the gradient of the output of layer 0 attention (backward, "
        "micro-batch 0): 1 of "
    ) in str(metrics[1].nonfinite)


def test_gradients_of_an_earlier_micro_batch_hide_no_output(tiny: Tiny) -> None:
    """Micro-batch 0 has an infinite gradient, micro-batch 1 a loss that is NaN, whose cause is an output."""

    class Later(WithWeight):
        at = (2, 1)

    experiment = tiny("training.iterations=2", "training.global_batch_size=4")
    with infinite_gradient_at(ModuleId(0, "proj")):
        words = str(trained(experiment, Later()).metrics[1].nonfinite)
    assert "the first tensor that is not finite is the output of layer 1 fc1 (forward, " in words


def test_a_value_that_does_not_come_back_is_named_by_its_gradient_alone(tiny: Tiny) -> None:
    """Something outside of the passes made it."""

    class Poisoned(RecordingObserver):
        def gradients(self, iteration: int, loss_scale: float | None) -> None:
            self.model.get_parameter("decoder.final_layernorm.weight").main_grad[2] = math.inf

    (metrics,) = trained(
        tiny("training.iterations=1", "training.warmup_iterations=0"), Poisoned()
    ).metrics
    words = str(metrics.nonfinite)
    assert words.startswith("the gradient of decoder.final_layernorm.weight is the first in the ")
    assert "the first tensor" not in words
