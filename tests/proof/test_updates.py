"""A step of the optimizer, its rate and its norm, against torch's AdamW and Megatron-Core's schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quantexp.proof.master_weights import AdamStep
from quantexp.proof.updates import (
    Held,
    clipped,
    rate,
    wrong_line,
    wrong_norm,
    wrong_omission,
    wrong_step,
)
from quantexp.schema import LrSchedule, TrainingConfig

BETAS, EPS, DECAY, LR, SIZE = (0.9, 0.95), 1e-8, 0.1, 3e-3, 4096


def _held(w: torch.Tensor, state: dict[str, torch.Tensor]) -> Held:
    kinds = ("exp_avg", "exp_avg_sq")
    moments = [state[k].double().numpy() if state else np.zeros(len(w)) for k in kinds]
    return Held(w.detach().double().numpy(), moments)


def _steps(number: int, scale: float) -> list[tuple[Held, Held, np.ndarray, AdamStep]]:
    """Steps of torch's AdamW: before, after, gradient, numbers."""
    generator = torch.Generator().manual_seed(3)
    w = torch.nn.Parameter(torch.randn(SIZE, generator=generator) * 0.02)
    adam = torch.optim.AdamW([w], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    found = []
    for t in range(1, number + 1):
        w.grad = torch.randn(SIZE, generator=generator) * scale * 2.0 ** (t % 5)
        before = _held(w.clone(), {k: v.clone() for k, v in adam.state[w].items()})
        adam.step()
        after = _held(w.clone(), {k: v.clone() for k, v in adam.state[w].items()})
        step = AdamStep(LR, *BETAS, EPS, DECAY, t)
        found.append((before, after, w.grad.double().numpy(), step))
    return found


@pytest.mark.parametrize("scale", [1e-22, 1e-9, 1e-3, 1e4])
def test_steps_of_adamw_are_right_whatever_the_size_of_gradients(scale: float) -> None:
    for before, after, gradient, step in _steps(40, scale):
        assert wrong_step(before, after, gradient, BETAS, step) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda step: replace(step, lr=step.lr * 1.001), "weights are not those of AdamW's step"),
        (lambda step: replace(step, weight_decay=0.0), "weights are not those of AdamW's step"),
        (lambda step: replace(step, eps=1e-5), "weights are not those of AdamW's step"),
        (lambda step: replace(step, steps=step.steps + 1), "weights are not those of"),
    ],
)
def test_steps_with_other_numbers_are_named(
    change: Callable[[AdamStep], AdamStep], words: str
) -> None:
    before, after, gradient, step = _steps(7, 1e-3)[-1]
    assert words in wrong_step(before, after, gradient, BETAS, change(step))


def test_moments_of_another_gradient_are_named() -> None:
    before, after, gradient, step = _steps(3, 1e-3)[-1]
    assert "of its first moment" in wrong_step(before, after, gradient * 0.999, BETAS, step)
    assert "of its second moment" in wrong_step(before, after, gradient, (0.9, 0.951), step)
    assert wrong_step(before, after, -gradient, BETAS, None) != ""


def test_a_matrix_that_is_moved_otherwise_has_its_momentum_compared_alone() -> None:
    before, after, gradient, _ = _steps(3, 1e-3)[-1]
    moved = Held(after.weights + 1, after.moments[:1])
    before = Held(before.weights, before.moments[:1])
    assert wrong_step(before, moved, gradient, BETAS[:1], None) == ""
    assert "first moment" in wrong_step(before, moved, gradient, (0.8,), None)


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("schedule", LrSchedule)
def test_rates_are_those_of_megatrons_schedule(schedule: LrSchedule, warmup: int) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from quantexp.training.megatron.transformer_config import scheduler

    decay = 12 if schedule is LrSchedule.wsd else None
    training = TrainingConfig(
        iterations=40, warmup_iterations=warmup, lr_schedule=schedule, decay_iterations=decay
    )
    group: dict[str, float] = {}
    own: OptimizerParamScheduler = scheduler(training, SimpleNamespace(param_groups=[group]))
    for step in range(1, 50):
        own.step(1)
        assert rate(training, step) == pytest.approx(group["lr"], rel=1e-12)


def test_a_gradient_is_clipped_by_its_norm() -> None:
    gradient = np.array([3.0, -4.0])
    training = TrainingConfig(clip_grad=1.0)
    assert np.allclose(clipped(gradient, training, 5.0), gradient / 5, rtol=1e-6)
    assert np.array_equal(clipped(gradient, training, 0.5), gradient)
    assert np.array_equal(clipped(gradient, TrainingConfig(clip_grad=0.0), 5.0), gradient)


def test_a_step_is_left_out_for_a_norm_that_float32_does_not_have() -> None:
    words = "the step was left out for a norm of inf, and that of the gradient is 2"
    assert wrong_omission(float("inf"), 2.0) == words
    assert wrong_omission(float("nan"), 3.4e38) != ""
    # 3.4028235e38 is float32's largest number; a sum in another order may pass it a little earlier.
    for own in (3.4028e38, 1e39, float("inf"), float("nan")):
        assert wrong_omission(float("nan"), own) == ""


def test_a_wrong_norm_is_named_and_one_that_is_not_known_is_not() -> None:
    assert wrong_norm(2.0, 2.0 * (1 + 1e-6)) == ""
    assert wrong_norm(2.0, float("nan")) == wrong_norm(2.0, float("inf")) == ""
    assert wrong_norm(1.0, 2.0) == "the norm of the gradient is 2, and 1 was taken for it"


def test_a_line_has_the_numbers_that_the_iteration_used() -> None:
    used = {"iteration": 3, "loss": 2.5, "grad_norm": math.inf, "lr": LR, "aux_loss": None}
    line = {
        "iteration": 3,
        "loss": 2.5,
        "grad_norm": None,
        "lr": LR * (1 + 1e-15),
        "aux_loss": None,
    }
    assert wrong_line({**line, "memory_gb": 1.0}, used, LR) == ""
    words = "loss in metrics.jsonl is 2.5000000000000004, and the iteration had 2.5"
    assert wrong_line({**line, "loss": 2.5000000000000004}, used, LR) == words
    for other in ({"lr": LR * 1.00001}, {"grad_norm": 3.0}, {"aux_loss": 0.0}, {"iteration": 4}):
        assert wrong_line({**line, **other}, used, LR) != ""
    del line["loss"]
    assert wrong_line(line, used, LR) == "loss in metrics.jsonl is None, and the iteration had 2.5"
