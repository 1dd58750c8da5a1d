"""The proof against known failures of earlier scripts: each is reproduced, and the run must fail and name the slot.

The numbers refer to the list of problems that users had: bf16 baselines that were quantised (2), schemes that were all
the same (3), an attention product in another format than configured (4), backward products that stayed unquantised
(5).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import quantexp.quant.linear
import quantexp.quant.multiply
import quantexp.quant.weight_cache.weights
import quantexp.training.megatron.linear
from quantexp.formats import Axis, QuantSpec, quantise
from quantexp.quant.multiply import quantise_operand
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import ProductContext, product_context
from quantexp.quant.sites import DGRAD_K_Q, DGRAD_Q_K, Product, Site, Slot
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status

RunTiny = Callable[..., RunDir]
ONE_STEP = ("training.iterations=1", "training.warmup_iterations=0", "capture=off")


def precision(run: RunDir) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run.precision.read_text())
    return content


def engaged(run: RunDir) -> set[tuple[str, str]]:
    """The (site, product.operand) slots where quantised operands were observed."""
    return {
        (e["site"], f"{e['product']}.{e['operand']}")
        for e in precision(run)["entries"]
        if e["quantised_calls"]
    }


def failure(run: RunDir) -> str:
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert not precision(run)["proved"]
    return status.reason


LINEAR = {
    ("linear", slot) for slot in ("fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x")
}
QK = {("qk", slot) for slot in ("fprop.q", "fprop.k", "dgrad_q.k", "dgrad_k.q")}


def quantise_linear_operands(
    monkeypatch: pytest.MonkeyPatch, how: Callable[[Tensor, QuantSpec, int], Tensor]
) -> None:
    """Quantise every operand of the linear layers in another way, including those that share a read."""

    def by_one(x: Tensor, spec: QuantSpec, axis: int, *_: object, **__: object) -> Tensor:
        return how(x, spec, axis)

    def in_product(x: Tensor, spec: QuantSpec, axis: int, *_: object) -> Tensor:
        is_linear = spec.axis in (Axis.INPUT_WIDTH, Axis.OUTPUT_WIDTH, Axis.TOKENS)
        return how(x, spec, axis) if is_linear else quantise_operand(x, spec, axis)

    def by_two(
        x: Tensor, first: QuantSpec, second: QuantSpec, axes: tuple[int, int], *_: object
    ) -> tuple[Tensor, Tensor]:
        return how(x, first, axes[0]), how(x, second, axes[1])

    for module in (quantexp.quant.linear, quantexp.quant.weight_cache.weights):
        monkeypatch.setattr(module, "quantise_operand", by_one)
        monkeypatch.setattr(module, "quantise_pair", by_two)
    monkeypatch.setattr(quantexp.quant.multiply, "quantise_operand", in_product)


#: Each kind and each format once; the other six are slow.
KINDS = {"FA": QK, "linear": LINEAR, "FA_linear": QK | LINEAR}
ONCE = ("FA_linear_mxfp8", "FA_mxfp4", "linear_hifp8")


@pytest.mark.parametrize(
    ("scheme", "slots"),
    [
        pytest.param(scheme, slots, marks=[] if scheme in ONCE else pytest.mark.slow)
        for kind, slots in KINDS.items()
        for scheme in (f"{kind}_mxfp8", f"{kind}_mxfp4", f"{kind}_hifp8")
    ],
)
def test_each_kind_of_scheme_engages_its_own_slots_and_no_others(
    run_tiny: RunTiny, scheme: str, slots: set[tuple[str, str]]
) -> None:
    run = run_tiny(f"quant={scheme}", *ONE_STEP)
    assert engaged(run) == slots
    statuses = {e["status"] for e in precision(run)["entries"] if e["format"] != "bf16"}
    assert statuses == {"engaged"}


def test_bf16_shows_zero_quantised_operands(run_tiny: RunTiny) -> None:
    run = run_tiny("quant=bf16", *ONE_STEP)
    assert precision(run)["quantised_calls"] == 0
    assert engaged(run) == set()
    assert {e["calls"] for e in precision(run)["entries"]} == {1}


def test_a_bf16_baseline_that_still_quantises_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number 2: leftover code quantises, the label says bf16."""

    def left_behind(
        precision: ModulePrecision, x: Tensor, w: Tensor, *rows: object, **copies: Tensor
    ) -> Tensor:
        with product_context(ProductContext(precision.module, Site.LINEAR, Product.FPROP)):
            return torch.matmul(quantise(x, "mxfp4"), w.t())

    monkeypatch.setattr(quantexp.training.megatron.linear, "fprop", left_behind)
    reason = failure(run_tiny("quant=bf16", *ONE_STEP, expect=1))
    assert "layer 0 qkv linear.fprop.x: declared bf16" in reason
    assert "linear.fprop.x: declared bf16" in reason
    assert "elements are not those of its source" in reason


def test_a_linear_scheme_that_also_quantises_attention_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number 3: linear_x did what FA_linear_x does."""
    monkeypatch.setattr(
        quantexp.quant.multiply,
        "quantise_operand",
        lambda x, operand, axis, *_, **__: quantise(x, "mxfp8", axis=axis),
    )
    reason = failure(run_tiny("quant=linear_mxfp8", *ONE_STEP, expect=1))
    assert "attention qk.fprop.q: declared bf16" in reason


def test_an_attention_product_in_e5m2_instead_of_e4m3_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number 4. E5M2's values lie on E4M3's grid except for the smallest: only the unused mantissa bit reveals them."""

    def e5m2(x: Tensor, spec: QuantSpec, axis: int, *rest: Any, **keywords: Any) -> Tensor:
        if not spec.quantised:
            return quantise_operand(x, spec, axis, *rest, **keywords)
        return quantise(x, "mxfp8_e5m2", axis=axis, scale_rule="rceil")

    monkeypatch.setattr(quantexp.quant.multiply, "quantise_operand", e5m2)
    reason = failure(run_tiny("quant=FA_mxfp8", *ONE_STEP, expect=1))
    assert "attention qk.fprop.q: declared mxfp8_e4m3" in reason
    assert "elements are not those of its source; it is mxfp8_e5m2" in reason


@pytest.mark.parametrize(
    "scheme",
    [
        "linear_mxfp4",
        pytest.param("linear_mxfp8", marks=pytest.mark.slow),
        pytest.param("linear_hifp8", marks=pytest.mark.slow),
    ],
)
def test_a_weight_gradient_from_the_originals_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Number 5: the weight gradient bypasses the scheme."""

    def originals(
        precision: ModulePrecision, g: Tensor, x: Tensor, rows: object, **copies: Tensor
    ) -> Tensor:
        with product_context(ProductContext(precision.module, Site.LINEAR, Product.WGRAD)):
            return torch.matmul(g.reshape(-1, g.shape[-1]).t(), x.reshape(-1, x.shape[-1]))

    monkeypatch.setattr(quantexp.training.megatron.linear, "wgrad", originals)
    reason = failure(run_tiny(f"quant={scheme}", *ONE_STEP, expect=1))
    assert "linear.wgrad.g: declared" in reason
    assert "elements are not those of its source: it is not quantised" in reason


def test_a_backward_of_attention_from_the_originals_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number 5: attention's backward pass multiplies k and q as they were before quantisation."""
    original = quantexp.quant.multiply.quantised_operand

    def forgetful(
        precision: ModulePrecision, slot: Slot, x: Tensor, *more: Any, **named: Any
    ) -> Tensor:
        if slot in (DGRAD_Q_K, DGRAD_K_Q):
            return x
        return original(precision, slot, x, *more, **named)

    monkeypatch.setattr(quantexp.quant.multiply, "quantised_operand", forgetful)
    reason = failure(run_tiny("quant=FA_mxfp4", *ONE_STEP, expect=1))
    assert "attention qk.dgrad_q.k: declared mxfp4_e2m1" in reason


def test_a_layer_that_quantises_and_multiplies_the_originals_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks_right(
        precision: ModulePrecision, x: Tensor, w: Tensor, *rows: object, **copies: Tensor
    ) -> Tensor:
        quantexp.quant.linear.fprop(precision, x, w)
        with product_context(ProductContext(precision.module, Site.LINEAR, Product.FPROP)):
            return torch.matmul(x, w.t())

    monkeypatch.setattr(quantexp.training.megatron.linear, "fprop", looks_right)
    reason = failure(run_tiny("quant=linear_hifp8", *ONE_STEP, expect=1))
    assert "layer 0 qkv linear.fprop.x: declared hifp8" in reason


def test_a_layer_that_multiplies_the_originals_unannounced_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products with a context are all correct; those whose results are used are hidden."""

    def hidden(
        precision: ModulePrecision, x: Tensor, w: Tensor, *rows: object, **copies: Tensor
    ) -> Tensor:
        quantexp.quant.linear.fprop(precision, x, w)
        return torch.matmul(x, w.t())

    monkeypatch.setattr(quantexp.training.megatron.linear, "fprop", hidden)
    reason = failure(run_tiny("quant=linear_mxfp8", *ONE_STEP, expect=1))
    assert "layer 0: 4 matrix products (aten.mm) that the precision map does not list" in reason


def test_a_hidden_product_in_the_backward_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(
        precision: ModulePrecision, g: Tensor, w: Tensor, *rows: object, **copies: Tensor
    ) -> Tensor:
        quantexp.quant.linear.dgrad(precision, g, w)
        return torch.matmul(g, w)

    monkeypatch.setattr(quantexp.training.megatron.linear, "dgrad", hidden)
    reason = failure(run_tiny("quant=linear_mxfp8", *ONE_STEP, expect=1))
    assert "layer 0: 4 matrix products (aten.mm) that the precision map does not list" in reason


def test_fused_attention_behind_the_scheme_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantexp.training.megatron.attention import SchemeAttention

    def fused(
        self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        o = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return o.permute(2, 0, 1, 3).flatten(2)

    monkeypatch.setattr(SchemeAttention, "forward", fused)
    reason = failure(run_tiny("quant=FA_mxfp8", *ONE_STEP, expect=1))
    assert "layer 0 attention qk.fprop.q: declared mxfp8_e4m3, no such product was called" in reason


def test_a_run_whose_proof_fails_takes_no_optimizer_step(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantise_linear_operands(monkeypatch, lambda x, operand, axis: x)
    run = run_tiny("quant=linear_mxfp8", *ONE_STEP, expect=1)
    assert not run.metrics.exists()
    assert "what ran is not what was declared, in iteration 1" in failure(run)


@pytest.mark.parametrize("fmt", ["mxfp4", pytest.param("hifp8", marks=pytest.mark.slow)])
def test_forward_copies_of_a_linear_layer_engage_in_the_backward(
    run_tiny: RunTiny, fmt: str
) -> None:
    """Their blocks lie along the forward product's axis, for every micro-batch."""
    words = [f"quant.linear.{slot}.format=reuse" for slot in ("dgrad.w", "wgrad.x")]
    run = run_tiny(f"quant=linear_{fmt}", *words, *ONE_STEP, "training.global_batch_size=4")
    assert precision(run)["proved"]
    assert engaged(run) == LINEAR
    for entry in precision(run)["entries"]:
        if entry["site"] == "linear":
            assert (entry["status"], entry["calls"]) == ("engaged", 2)


@pytest.mark.slow
def test_every_full_backward_scheme_engages(run_tiny: RunTiny) -> None:
    for fmt in ("mxfp8", "mxfp4", "hifp8"):
        run = run_tiny(f"quant=more/FA_full_{fmt}", *ONE_STEP)
        assert ("qk", "dgrad_q.dS") in engaged(run)
        assert precision(run)["proved"]


@pytest.mark.parametrize(
    "fmt",
    [
        "mxfp8",
        pytest.param("mxfp4", marks=pytest.mark.slow),
        pytest.param("hifp8", marks=pytest.mark.slow),
    ],
)
def test_the_value_product_engages_on_its_own(run_tiny: RunTiny, fmt: str) -> None:
    run = run_tiny("quant=bf16", f"quant/pv={fmt}", *ONE_STEP)
    assert engaged(run) == {("pv", s) for s in ("fprop.P", "fprop.v", "dgrad_p.v", "dgrad_v.P")}


@pytest.mark.slow
def test_a_change_of_rules_is_proved_again(run_tiny: RunTiny) -> None:
    run = run_tiny(
        "quant=linear_mxfp8",
        "quant.rules=[{iterations: [1, 1], format: bf16}]",
        "training.iterations=2",
        "capture=off",
    )
    record = precision(run)
    assert (record["iteration"], record["quantised_calls"] > 0) == (2, True)
    assert [(e["iteration"], e["quantised_calls"]) for e in record["earlier"]] == [(1, 0)]


def test_recomputed_products_are_counted_separately(run_tiny: RunTiny) -> None:
    run = run_tiny("quant=FA_linear_mxfp8", "training.recompute=full", *ONE_STEP)
    for is_fprop in (True, False):
        entries = [e for e in precision(run)["entries"] if (e["product"] == "fprop") == is_fprop]
        assert {(e["calls"], e["recomputed_calls"]) for e in entries} == {(1, int(is_fprop))}


@pytest.mark.slow
def test_micro_batches_are_all_counted(run_tiny: RunTiny) -> None:
    run = run_tiny("quant=linear_mxfp8", "training.global_batch_size=6", *ONE_STEP)
    assert {e["calls"] for e in precision(run)["entries"]} == {3}


@pytest.mark.slow
def test_a_start_that_overflows_is_watched_until_it_can_be_proved(run_tiny: RunTiny) -> None:
    """An fp16 run with a too large initial scale: its first gradients contain Inf and prove nothing."""
    run = run_tiny(
        "quant=linear_mxfp8",
        "training.precision=fp16",
        f"training.initial_loss_scale={2.0**22}",
        "training.iterations=12",
        "capture=off",
    )
    record = precision(run)
    assert record["proved"]
    assert record["iteration"] > 1
    assert not record["earlier"][0]["proved"]
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert lines[0]["skipped"]
    assert lines[0]["grad_norm"] is None


def test_a_start_that_never_becomes_finite_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantexp.training.proofs.MAX_PROOFS", 2)
    run = run_tiny(
        "quant=linear_mxfp8",
        "training.precision=fp16",
        f"training.initial_loss_scale={2.0**63}",
        "training.iterations=9",
        "capture=off",
        expect=1,
    )
    assert "could not be proved in 2 iterations: operands contain NaN or Inf" in failure(run)


@pytest.mark.slow
def test_small_fp16_gradients_do_not_fail_an_honest_run(run_tiny: RunTiny) -> None:
    run = run_tiny(
        "quant=bf16",
        "training.precision=fp16",
        "training.initial_loss_scale=1",
        "training.seq_length=256",
        "training.global_batch_size=32",
        "training.micro_batch_size=4",
        *ONE_STEP,
    )
    assert precision(run)["quantised_calls"] == 0
