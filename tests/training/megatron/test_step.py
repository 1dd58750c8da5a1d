"""The order of events in one optimizer step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quantexp.schema import Experiment
from quantexp.training.megatron import step, watched_step
from quantexp.training.megatron.finite import step_if_finite
from tests.training.megatron.test_trainer import record_training


def test_every_step_waits_for_copies_from_a_gpu_before_it_changes_a_gradient_or_weight(
    tiny: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def stepping(*args: object) -> tuple[bool, float]:
        events.append("step")
        return step_if_finite(*args)  # type: ignore[arg-type]

    def waiting(device: torch.device) -> None:
        events.append("wait")

    monkeypatch.setattr(watched_step, "step_if_finite", stepping)
    monkeypatch.setattr(step, "wait_for_copies", waiting)
    record_training(tiny("training.iterations=2"))
    assert events == ["wait", "step"] * 2
