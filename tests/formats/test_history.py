"""Delayed scaling: which amax applies when, and saving the state."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from quantexp.formats import FORMATS, AmaxHistory, decode, encode, lies_on_grid, quantise, resolve

from .tensors import assert_same

CPU = torch.device("cpu")
SCALED = [name for name, fmt in FORMATS.items() if "scaling" in fmt.options]


def after(history: AmaxHistory, *steps: list[float]) -> float | None:
    """The history's amax after steps that observed tensors with these amaxes."""
    for amaxes in steps:
        for amax in amaxes:
            history.observe(torch.tensor([0.5 * amax, -amax]))
        history.advance()
    return None if history.amax is None else float(history.amax)


def test_the_largest_of_the_last_steps_counts() -> None:
    assert after(AmaxHistory(3)) is None
    assert after(AmaxHistory(3), [2.0]) == 2.0
    assert after(AmaxHistory(3), [2.0], [5.0], [1.0], [1.0]) == 5.0
    assert after(AmaxHistory(3), [2.0], [5.0], [1.0], [1.0], [1.0]) == 1.0
    assert after(AmaxHistory(1), [2.0], [1.0]) == 1.0


def test_a_step_counts_by_its_largest_tensor_and_only_once_it_has_ended() -> None:
    history = AmaxHistory(1)
    history.observe(torch.tensor([3.0]))
    assert history.amax is None
    history.observe(torch.tensor([2.0]))
    history.advance()
    assert history.amax == 3.0
    history.observe(torch.tensor([9.0]))
    assert history.amax == 3.0


def test_a_step_that_observed_nothing_leaves_no_trace() -> None:
    assert after(AmaxHistory(2), [4.0], [], [], [1.0]) == 4.0


def test_reading_the_amax_observes_nothing() -> None:
    history = AmaxHistory(2)
    assert history.amax_for(torch.tensor([7.0])) == 7.0
    history.advance()
    assert history.amax is None
    after(history, [2.0])
    assert history.amax_for(torch.tensor([7.0])) == 2.0
    history.advance()
    assert history.amax == 2.0


def test_amaxes_are_over_finite_elements() -> None:
    history = AmaxHistory(2)
    history.observe(torch.tensor([1.0, math.nan, -math.inf]))
    history.advance()
    assert history.amax == 1.0


@pytest.mark.parametrize("name", SCALED)
def test_delayed_scaling_is_current_scaling_with_the_earlier_amax(name: str) -> None:
    history = AmaxHistory(2)
    after(history, [3.0])
    x = torch.randn(200, generator=torch.Generator().manual_seed(1))
    amax = history.amax_for(x)
    y = quantise(x, name, scaling="delayed", amax=amax)
    assert_same(y, quantise(x, name, scaling="current", amax=torch.tensor(3.0)))
    codes, scales = encode(x, name, scaling="delayed", amax=amax)
    assert_same(decode(codes, scales, name), y)
    assert lies_on_grid(y, resolve(name, scaling="delayed"), amax=amax).all()


def test_values_beyond_the_history_saturate() -> None:
    """Amax 1 gives hifp8 the scale 8, so that 32768 / 8 is the largest."""
    y = quantise(torch.tensor([1e6]), "hifp8", scaling="delayed", amax=torch.tensor(1.0))
    assert y.tolist() == [4096.0]


def test_the_state_continues_where_it_was_saved() -> None:
    history = AmaxHistory(3)
    after(history, [1.1], [0.3], [0.2])
    saved = json.loads(json.dumps(history.state_dict()))
    assert list(saved) == ["window", "amaxes"]
    again = AmaxHistory(3)
    again.load_state_dict(saved, CPU)
    for amax in ([0.1], [0.4], [0.05], [0.06]):
        assert after(again, amax) == after(history, amax)
    assert again.state_dict() == history.state_dict()


def test_a_state_of_another_window_is_refused() -> None:
    with pytest.raises(ValueError, match="an amax history of 3 steps cannot continue one of 4"):
        AmaxHistory(4).load_state_dict(AmaxHistory(3).state_dict(), CPU)


@pytest.mark.parametrize("window", [0, -1, 2.0, True])
def test_a_window_is_at_least_one_step(window: Any) -> None:
    with pytest.raises(
        ValueError, match=f"a window of steps must be an integer of at least 1, got {window}"
    ):
        AmaxHistory(window)


def test_discarded_step_leaves_the_history_unchanged() -> None:
    history = AmaxHistory(4)
    history.observe(torch.tensor([2.0]))
    history.advance()
    history.observe(torch.tensor([1e30]))
    history.advance(keep=False)
    assert history.state_dict() == {"window": 4, "amaxes": [2.0]}
