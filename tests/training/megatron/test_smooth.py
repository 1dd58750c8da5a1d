"""The gradient of the loss that stochastic rounding of weights costs, to second order (LOTION, arXiv 2510.08757)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.formats.estimator import noise_slopes
from quantexp.runs.paths import RunDir
from quantexp.runs.precision import read_precision
from quantexp.runs.status import State, read_status
from quantexp.training.megatron import rounded_pieces, rounded_state
from quantexp.training.megatron.rounded_state import RoundedState
from quantexp.training.megatron.smooth import smoothed

from .test_master import is_linear, state

RunTiny = Callable[..., RunDir]
SMOOTH = "quant.optimizer.smooth"
B2 = 0.95
RUN = [
    *("quant=bf16", "capture=off", "training.iterations=4", "training.warmup_iterations=0"),
    *("training.lr=2e-3", "training.precision=fp32", "model.hidden_size=128"),
    *(f"{SMOOTH}={{format: int4_g128, strength: 30}}", "model.ffn_hidden_size=256"),
]
KEEP = ["checkpoint.every=1", "checkpoint.optimizer=true"]


def int4_scale(w: np.ndarray) -> np.ndarray:
    """amax / 7 in bfloat16 of each row of 128 weights."""
    scale = torch.from_numpy(np.abs(w).max(axis=1, keepdims=True) / np.float32(7))
    return scale.bfloat16().double().numpy()


def int4_variance(w: np.ndarray) -> np.ndarray:
    """Of random rounding to the integers from -7 to 7."""
    scale = int4_scale(w)
    share = np.modf(np.minimum(np.abs(w.astype(np.float64)) / scale, 7))[0]
    variance: np.ndarray = scale**2 * share * (1 - share)
    return variance


def assert_map_and_proof_name_the_term(run: RunDir) -> None:
    record = read_precision(run.precision)
    assert (record["proved"], record["iteration"]) == (True, 1)
    entries: list[dict[str, Any]] = [dict(entry) for entry in record["entries"]]
    entry = next(e for e in entries if e["site"] == "optimizer")
    keys = ("module", "product", "operand", "format", "status", "strength")
    assert [entry[key] for key in keys] == [
        *("linear weights", "smooth", "dw", "int4_g128", "engaged", 30.0)
    ]


def test_the_gradient_of_the_term_is_added_and_map_and_proof_name_it(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By central differences of the variances under the scales of the unmoved blocks, over 1e-6 of a scale."""
    steps: list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]] = []
    plain = RoundedState.around_step

    @contextlib.contextmanager
    def around_step(self: RoundedState, *args: Any) -> Iterator[None]:
        held = self._held.items()
        weights = {name: each.main.detach().clone() for name, each in held}
        before = {name: each.main.grad.clone() for name, each in held}
        with plain(self, *args):
            steps.append((weights, before, {name: each.main.grad.clone() for name, each in held}))
            yield

    monkeypatch.setattr(RoundedState, "around_step", around_step)
    run = run_tiny(*RUN, *KEEP)
    assert_map_and_proof_name_the_term(run)
    curvature: dict[str, np.ndarray] = {}
    for t, (weights, before, after) in enumerate(steps, start=1):
        for name in before:
            if not is_linear(name):
                assert torch.equal(before[name], after[name])
                continue
            w = weights[name].view(-1, 128).numpy()
            gradient = before[name].view(w.shape).double().numpy()
            last = curvature.get(name, gradient**2)
            moment = curvature[name] = B2 * last + (1 - B2) * gradient**2
            saved = state(run, t)[f"curvature/{name}"].view(w.shape).numpy()
            np.testing.assert_allclose(saved, moment, rtol=1e-6)
            scale = int4_scale(w)
            v, step = np.abs(w.astype(np.float64)) / scale, 1e-6
            low, high = (
                (v + d - np.floor(v)) * (np.floor(v) + 1 - v - d) * scale**2 for d in (-step, step)
            )
            slope = np.sign(w) * (high - low) / (2 * step * scale)
            expected = gradient + 30 / 2 * moment * slope
            actual = after[name].view(w.shape).double().numpy()
            is_inside = (np.abs(v - np.round(v)) > 1e-4) & (v < 6.999)
            assert is_inside.mean() > 0.95
            size = np.abs(moment * slope).max()
            difference = np.abs(actual - expected)[is_inside]
            # differences over 1e-6 are known to 1e-10 of 1, and a gradient to 6e-8 of it
            assert (difference <= 1e-7 * np.abs(expected)[is_inside] + 1e-6 * 15 * size).all()
            assert np.abs(actual - before[name].view(w.shape).numpy()).max() > 0
            largest = v > 7.0001
            assert (actual[largest] == before[name].view(w.shape).numpy()[largest]).all()


def test_training_lowers_the_variance(run_tiny: RunTiny) -> None:
    """A large strength moves weights to values of the format."""
    keep = ["checkpoint.at_end=true", "checkpoint.optimizer=true"]
    words = [*RUN, *keep, "training.iterations=40", "training.weight_decay=0"]
    ends = [
        state(run_tiny(*words, f"{SMOOTH}.strength={strength}"), 40) for strength in ("1e-6", "1e6")
    ]
    for name in (key[5:] for key in ends[0] if key.startswith("main/") and is_linear(key)):
        plain, smooth = (
            int4_variance(end[f"main/{name}"].view(-1, 128).numpy()).mean() for end in ends
        )
        assert smooth < 0.85 * plain, name


def _slopes(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    plain = noise_slopes

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rounded_pieces, "noise_slopes", lambda *args: change(plain(*args)))

    return plant


@pytest.mark.parametrize(
    "plant",
    [_slopes(lambda x: -x), _slopes(lambda x: x * 0.5), _slopes(torch.zeros_like)],
    ids=["the other sign", "half", "nothing"],
)
def test_a_fault_is_named(
    run_tiny: RunTiny,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    run = run_tiny(*RUN, expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert "iteration 1: optimizer.smooth.dw of " in str(status.reason)
    assert "elements are not the slopes of its noise" in str(status.reason)


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("curvature", lambda g, *others: g.double().abs(), "elements of the curvature are wrong"),
        ("smoothed", lambda g, *others: g, "elements of the gradient are wrong"),
        ("smoothed", lambda g, s, c, f: smoothed(g, s, c, 2 * f), "of the gradient are wrong"),
    ],
    ids=["another curvature", "not added", "twice"],
)
def test_a_wrong_sum_is_named(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, words: str
) -> None:
    monkeypatch.setattr(rounded_state, name, fault)
    run = run_tiny(*RUN, expect=1)
    status = read_status(run.status)
    assert status is not None
    assert "iteration 1: optimizer.smooth.dw of " in str(status.reason)
    assert words in str(status.reason)
