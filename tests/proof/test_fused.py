"""The proof observes fused attention: the inputs of the one call that runs all products."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.capture import open_capture
from quantexp.capture.reader import CapturedTensor
from quantexp.quant import multiply
from quantexp.quant.attention import fused
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from tests.recorded import failure

RunTiny = Callable[..., RunDir]
FUSED = (
    "training.attention=fused",
    "training.iterations=1",
    "training.warmup_iterations=0",
    "capture=off",
)
WITHIN = "within the fused kernel, in high precision"


def entries(run: RunDir) -> dict[tuple[int, str], dict[str, Any]]:
    """The attention's entries by layer and slot."""
    content = json.loads(run.precision.read_text())
    return {
        (e["layer"], f"{e['site']}.{e['product']}.{e['operand']}"): e
        for e in content["entries"]
        if e["site"] != "linear"
    }


def test_every_operand_that_enters_the_kernel_is_judged(run_tiny: RunTiny) -> None:
    run = run_tiny("quant=FA_linear_mxfp8", *FUSED)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.COMPLETED, status.reason
    by_slot = entries(run)
    slots = {slot for _, slot in by_slot}
    within = {slot for slot in slots if slot.endswith((".P", ".dS"))}
    assert len(within) == 4
    for (_, slot), entry in by_slot.items():
        assert entry["calls"] == entries_of_linear(run)
        if slot in within:
            assert (entry["status"], entry["reason"]) == ("inconclusive", WITHIN)
        else:
            assert entry["status"] == "engaged", (slot, entry["reason"])
            quantised = slot.startswith("qk.")
            assert bool(entry["quantised_calls"]) == quantised, slot


def entries_of_linear(run: RunDir) -> int:
    """How often each linear product was called: once a micro-batch."""
    content = json.loads(run.precision.read_text())
    (calls,) = {e["calls"] for e in content["entries"] if e["site"] == "linear"}
    return int(calls)


@pytest.mark.slow
def test_recomputed_calls_are_counted_separately(run_tiny: RunTiny) -> None:
    by_slot = entries(run_tiny("quant=FA_mxfp8", "training.recompute=full", *FUSED))
    assert len(by_slot) == 24
    for (_, slot), entry in by_slot.items():
        is_forward = ".fprop." in slot
        assert entry["recomputed_calls"] == (entry["calls"] if is_forward else 0), slot


def test_kernel_that_receives_the_originals_fails_the_run(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiply, "quantise_operand", lambda x, *_, **__: x)
    reason = failure(run_tiny("quant=FA_mxfp8", *FUSED, expect=1))
    assert "qk.fprop.q: declared mxfp8_e4m3" in reason
    assert "are not those of its source: it is not quantised" in reason


def test_bf16_that_is_quantised_fails_the_run(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantexp.formats import quantise

    monkeypatch.setattr(multiply, "quantise_operand", lambda x, *_, **__: quantise(x, "mxfp8"))
    assert "are not those of its source" in failure(run_tiny("quant=bf16", *FUSED, expect=1))


def test_unannounced_fused_call_fails_the_run(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = fused._kernel

    def twice(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        from quantexp.quant import product_context

        saved, product_context._current.context = product_context._current.context, None
        with torch.no_grad():
            kernel(q, k, v, scale, mask)
        product_context._current.context = saved
        return kernel(q, k, v, scale, mask)

    monkeypatch.setattr(fused, "_kernel", twice)
    assert "that the precision map does not list" in failure(
        run_tiny("quant=bf16", *FUSED, expect=1)
    )


def _which(entry: CapturedTensor) -> tuple[int, str, str]:
    return entry.metadata["layer"], entry.metadata["operation"], entry.metadata["tensor"]


@pytest.mark.slow
def test_probabilities_are_captured_and_recomputation_counts_nothing_twice(
    run_tiny: RunTiny,
) -> None:
    words = ("capture.attn_weights=true", "training.recompute=full", "quant=FA_mxfp8")
    captures = []
    for path in ("fused", "plain"):
        run = run_tiny(*words, f"training.attention={path}", "training.iterations=2")
        capture = open_capture(run.tensors)
        captures.append({_which(e): e for e in capture.select(module="attention")})
    ours, theirs = captures
    assert ours.keys() == theirs.keys()
    assert {(0, "forward", "attn_weights"), (0, "backward", "grad_attn_weights")} <= ours.keys()
    assert {(0, "backward", "grad_scores"), (0, "backward", "grad_query")} <= ours.keys()
    for key, entry in ours.items():
        one, other = entry.torch().double(), theirs[key].torch().double()
        # bfloat16 in which the plain path rounds four times more, and the effect on the layers between
        assert float((one - other).norm() / other.norm()) < 0.02, key
        assert entry.metadata["attention"] == "fused"
