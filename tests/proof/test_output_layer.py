"""The proof against faults of the output layer and of an embedding that is tied to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from torch import Tensor

from quantexp.quant.linear import fprop
from quantexp.runs.paths import RunDir
from quantexp.training.megatron import embedding, linear
from tests.proof.test_engagement import LINEAR, ONE_STEP, engaged, failure, precision

RunTiny = Callable[..., RunDir]
WORDS = (*ONE_STEP, "quant=linear_mxfp8", "quant/output=mxfp8")
SLOTS = {("output", slot) for _, slot in LINEAR}


@pytest.mark.parametrize(
    ("tied", "beside"), [("true", {("output", "lookup.w")}), ("false", set())], ids=str
)
def test_output_layer_and_a_tied_embedding_are_proved(
    run_tiny: RunTiny, tied: str, beside: set[tuple[str, str]]
) -> None:
    run = run_tiny(*WORDS, f"model.tie_embeddings={tied}")
    assert engaged(run) == LINEAR | SLOTS | beside
    names = {(e["module"], e["layer"]) for e in precision(run)["entries"] if e["site"] == "output"}
    assert names == {("output", 2)} | ({("embedding", 2)} if beside else set())


def test_output_layer_that_multiplies_the_originals_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:

    def original(declared: Any, x: Tensor, w: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if declared.module.name == "output":
            kwargs |= {"quantised_x": x, "quantised_w": w}
        return fprop(declared, x, w, *args, **kwargs)

    monkeypatch.setattr(linear, "fprop", original)
    reason = failure(run_tiny(*WORDS, expect=1))
    assert "output layer output.fprop.x: declared mxfp8_e4m3, " in reason
    assert "output layer output.fprop.w: declared mxfp8_e4m3, " in reason


def test_stock_product_of_the_output_layer_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        linear.SchemeOutputLayer, "_forward_impl", ColumnParallelLinear._forward_impl
    )
    run = run_tiny(*WORDS, expect=1)
    failure(run)
    failures = precision(run)["failures"]
    assert (
        "output layer output.dgrad.g: declared mxfp8_e4m3, no such product was called" in failures
    )
    words = "matrix products (aten.mm) that the precision map does not list"
    assert any(each.startswith("output layer: ") and each.endswith(words) for each in failures)


def test_lookup_in_the_original_weight_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding._Table, "apply", lambda w, *_: w)
    reason = failure(run_tiny(*WORDS, expect=1))
    assert "embedding output.lookup.w: declared mxfp8_e4m3, " in reason
    assert "elements are not those of its source: it is not quantised" in reason


def test_stock_lookup_fails(run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding.SchemeEmbedding, "forward", VocabParallelEmbedding.forward)
    reason = failure(run_tiny(*WORDS, expect=1))
    assert "embedding output.lookup.w: declared mxfp8_e4m3, no such product was called" in reason


def test_output_layer_in_high_precision_for_now_is_proved_too(run_tiny: RunTiny) -> None:
    run = run_tiny(
        *("quant=linear_mxfp8", "quant/output=mxfp8", "capture=off"),
        "quant.rules=[{iterations: [1, 1], format: bf16}]",
    )
    first, second = precision(run)["earlier"][0], precision(run)
    assert first["quantised_calls"] == 0
    assert {e["format"] for e in first["entries"] if e["site"] == "output"} == {"bf16"}
    assert {e["status"] for e in second["entries"] if e["site"] == "output"} == {"engaged"}
