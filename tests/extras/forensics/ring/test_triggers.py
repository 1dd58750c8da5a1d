"""The triggers: each fires at its own trouble, and none without one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quantexp.extras.forensics.ring.store import Iteration, TensorKey
from quantexp.extras.forensics.ring.triggers import Triggers
from quantexp.runs.dossiers import Trigger
from quantexp.runs.metrics import Metrics
from quantexp.schema import TriggerConfig

INPUT = TensorKey(3, "fc1", "forward", "input")
QUERY = TensorKey(0, "attention", "forward", "query")


def step(loss: float = 3.0, grad_norm: float = 1.0, **more: Any) -> Metrics:
    return Metrics(1, loss, grad_norm, 1e-4, 128, 0.5, 256.0, 0.1, 2.0, **more)


def warmed(**config: Any) -> Triggers:
    """After 20 quiet iterations, whose loss falls as it does in training."""
    triggers = Triggers(TriggerConfig(**config))
    for index in range(20):
        metrics = step(3.0 - 0.01 * index, 1.0 + 0.02 * (index % 3))
        assert triggers.of_metrics(metrics) is None
    return triggers


@pytest.mark.parametrize(
    ("metrics", "trigger", "words"),
    [
        (
            step(loss=7.0),
            Trigger.LOSS,
            "loss 7 lies 55.2 robust deviations above its median 2.905",
        ),
        (
            step(grad_norm=9.0),
            Trigger.GRAD_NORM,
            "gradient norm 9 lies 269.1 robust deviations above its median 1.02",
        ),
    ],
)
def test_spike_fires(metrics: Metrics, trigger: Trigger, words: str) -> None:
    fired = warmed().of_metrics(metrics)
    assert fired is not None
    assert (fired.trigger, fired.words) == (trigger, words)


def test_no_spike_without_enough_deviations_or_downwards() -> None:
    assert warmed(deviations=50.0).of_metrics(step(loss=6.0)) is None
    assert warmed(deviations=None).of_metrics(step(loss=600.0)) is None
    assert warmed().of_metrics(step(loss=0.1, grad_norm=0.01)) is None


def test_left_out_step_fires_at_once_with_its_cause() -> None:
    left_out = step(loss=math.nan, skipped=True, nonfinite="3 NaN in L0-fc1 output")
    fired = Triggers(TriggerConfig(deviations=None)).of_metrics(left_out)
    assert fired is not None
    assert (fired.trigger, fired.words) == (Trigger.NONFINITE, "3 NaN in L0-fc1 output")
    overflow = step(loss=3.0, grad_norm=math.inf, skipped=True, loss_scale=65536.0)
    assert Triggers(TriggerConfig()).of_metrics(overflow) is None, "fp16 lowers its scale"


def held(*shares: float, of: str = "saturated", key: TensorKey = INPUT) -> list[Iteration]:
    """A ring in which one tensor's share is given, and another's is constant."""
    iterations = []
    for number, share in enumerate(shares, 1):
        iteration = Iteration(number)
        getattr(iteration, of).update({key: share, QUERY: 0.2})
        iterations.append(iteration)
    return iterations


def test_risen_share_of_saturated_values_fires() -> None:
    ring = held(0.0, 0.01, 0.0, 0.01, 0.02, 0.31)
    fired = Triggers(TriggerConfig()).of_shares(ring)
    assert fired is not None
    assert fired.trigger is Trigger.SATURATED
    assert fired.words == (
        "the share of values that saturate in L3-fc1 input is 31.0%, the median of 5 iterations before 1.0%"
    )


def test_risen_share_of_underflowed_values_fires() -> None:
    fired = Triggers(TriggerConfig(share=0.5)).of_shares(held(*[0.1] * 7, 0.7, of="underflow"))
    assert fired is not None
    assert fired.trigger is Trigger.UNDERFLOW
    assert fired.words.startswith("the share of non-zero values of L3-fc1 input that become zero")


def test_share_does_not_fire_unrisen_or_restless_or_where_it_is_off() -> None:
    ring = held(0.0, 0.0, 0.0, 0.0, 0.0, 0.4)
    assert Triggers(TriggerConfig(share=None)).of_shares(ring) is None
    assert Triggers(TriggerConfig(share=0.5)).of_shares(ring) is None
    restless = held(0.0, 0.2, 0.0, 0.2, 0.1, 0.4)
    assert Triggers(TriggerConfig(share=0.1)).of_shares(restless) is None
    assert Triggers(TriggerConfig(share=0.1, deviations=None)).of_shares(restless) is not None
    assert Triggers(TriggerConfig()).of_shares(held(*[0.3] * 9)) is None
    new = [*held(*[0.1] * 8), *held(0.9, key=TensorKey(1, "expert3-fc1", "forward", "input"))]
    assert Triggers(TriggerConfig()).of_shares(new) is None, "an expert without tokens before"
