"""Weights are pulled towards their values in a format, after the step of any optimizer (CAGE, arXiv 2510.18784)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from quantexp.runs.paths import RunDir
from quantexp.runs.precision import read_precision
from quantexp.runs.status import State, read_status
from quantexp.training.megatron import rounded_state
from quantexp.training.megatron.pull import pulled, strength_of
from quantexp.training.megatron.rounded_state import RoundedState

from .test_master import state
from .test_moments import fp8_in_blocks

RunTiny = Callable[..., RunDir]
PULL = "quant.optimizer.pull"
LR = 2e-3
RUN = [
    *("quant=bf16", "capture=off", "training.iterations=8", "training.warmup_iterations=0"),
    *(f"training.lr={LR}", "training.lr_schedule=constant", "training.precision=fp32"),
    f"{PULL}={{format: fp8_1x128, strength: 50, start: 0.5}}",
]


def assert_map_and_proof_name_the_pull(run: RunDir) -> None:
    record = read_precision(run.precision)
    assert record["proved"]
    assert record["iteration"] == 5
    entries: list[dict[str, Any]] = [dict(entry) for entry in record["entries"]]
    entry = next(e for e in entries if e["site"] == "optimizer")
    keys = ("module", "product", "operand", "format", "status", "strength", "start")
    assert [entry[k] for k in keys] == [
        *("linear weights", "pull", "w", "fp8_1x128", "engaged", 50.0, 0.5)
    ]
    (first,) = record["earlier"]  # type: ignore[typeddict-item]
    reasons = [e["reason"] for e in first["entries"] if e["site"] == "optimizer"]
    assert reasons == ["the first pull is in iteration 5"]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_weights_are_pulled_as_the_paper_says_and_map_and_proof_name_it(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """From what the optimizer leaves; of iterations 5 to 8 by quarters of the strength. E4M3 by torch's own float8:
    rounding of a few near ties differs by one value, an eighth, and the weight by a tenth of that at most.
    """
    before: list[dict[str, Tensor]] = []
    plain = RoundedState._rounded_copies

    def recorded(self: RoundedState, slot: Any, *others: Any) -> Any:
        pieces = plain(self, slot, *others)
        before.append({piece.name: self._flat(piece.name, slot).clone() for piece in pieces})
        return pieces

    monkeypatch.setattr(RoundedState, "_rounded_copies", recorded)
    sizes = ["model.hidden_size=128", "model.ffn_hidden_size=256"]
    keep = ["checkpoint.every=1", "checkpoint.optimizer=true"]
    run = run_tiny(*RUN, *sizes, *keep, f"training.optimizer={optimizer}")
    assert_map_and_proof_name_the_pull(run)
    assert [len(each) for each in before] == [8] * 4
    for iteration, weights in zip((5, 6, 7, 8), before, strict=True):
        own = state(run, iteration)
        strength = 50 * (iteration - 4) / 4
        for name, w in weights.items():
            image = fp8_in_blocks(w.view(-1, 128)).view(-1).double().numpy()
            wide = w.double().numpy()
            expected = wide - LR * strength * (wide - image)
            after = own[f"main/{name}"].view(-1).numpy()
            assert (np.abs(after - expected) > 1e-6 * np.abs(expected) + 1e-9).mean() < 2e-3
            assert np.abs(after - wide).max() > 1e-5


def test_all_kinds_of_rounded_weights_compose(run_tiny: RunTiny) -> None:
    """In the order pull, reset, store."""
    others = ["quant.optimizer.reset={format: nvfp4, every: 3, over: 1, ratio: 1.2, start: 0}"]
    others += ["quant.optimizer.master={format: fp16_scaled, feedback: true}"]
    others += ["quant.optimizer.exp_avg.format=mxfp8", "quant/linear=mxfp8"]
    record = read_precision(run_tiny(*RUN, *others).precision)
    assert record["proved"]
    products = [e["product"] for e in record["entries"] if e["site"] == "optimizer"]
    assert products == ["pull", "reset", "master", "adam"]


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("strength_of", lambda *args: 0.0, "no step has rounded it"),
        ("strength_of", lambda *args: 2 * strength_of(*args), "are not as they must be pulled"),
        ("pulled", lambda w, image, factor: w, "are not as they must be pulled"),
        ("pulled", lambda w, *others: pulled(w, w, 1.0), "are not as they must be pulled"),
        ("pulled", lambda w, image, f: pulled(w, image, -f), "are not as they must be pulled"),
    ],
    ids=["never", "twice as strong", "not at all", "towards itself", "away"],
)
def test_a_fault_is_named(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, words: str
) -> None:
    monkeypatch.setattr(rounded_state, name, fault)
    run = run_tiny(*RUN, expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert "iteration 5: optimizer.pull.w" in str(status.reason)
    assert words in str(status.reason)
