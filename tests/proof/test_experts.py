"""Proof of engagement for experts with few or no tokens, and for the router, which no scheme quantises."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from megatron.core.transformer.moe import router
from torch import Tensor

from quantexp.formats import quantise, resolve
from quantexp.proof.findings import Status
from quantexp.proof.merging import merged
from quantexp.proof.verdict import NO_TOKENS, NOT_CALLED, SlotCalls, Verdict, status_of
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.records import entry_record
from quantexp.quant.sites import FPROP_X
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status

pytestmark = pytest.mark.slow

RunTiny = Callable[..., RunDir]
#: Four tokens and one expert for each: at least twelve of sixteen have none.
FEW = [
    "training.seq_length=2",
    "training.global_batch_size=2",
    "training.micro_batch_size=2",
    "model.moe.num_experts=16",
    "model.moe.top_k=1",
]


def precision(run: RunDir) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run.precision.read_text())
    return content


@pytest.mark.parametrize(
    "scheme",
    [
        "FA_linear_mxfp8",
        "more/linear_hifp8_delayed",
        "more/linear_mxfp4_sr_rht",
        "more/linear_nvfp4",
    ],
)
def test_an_expert_without_tokens_is_not_reached_and_the_run_continues(
    run_tiny: RunTiny, tiny_models: dict[str, list[str]], scheme: str
) -> None:
    run = run_tiny(f"quant={scheme}", *tiny_models["deepseek2_lite"], *FEW)
    record = precision(run)
    assert record["proved"]
    empty = {e["module"] for e in record["entries"] if e["status"] == "not_reached"}
    assert 24 <= len(empty) < 32
    assert {e["reason"] for e in record["entries"] if e["module"] in empty} == {NO_TOKENS}
    assert all(e["calls"] == 0 for e in record["entries"] if e["module"] in empty)
    manifest = (run.tensors / "manifest.jsonl").read_text().splitlines()
    captured = {(line["module"], line["tensor"]) for line in map(json.loads, manifest)}
    assert {tensor for module, tensor in captured if module in empty} == {"weight"}
    reached = {e["module"] for e in record["entries"]} - empty
    assert {module for module, tensor in captured if tensor != "weight"} == reached


def test_every_product_of_latent_attention_and_experts_engages_or_has_no_tokens(
    run_tiny: RunTiny, tiny_models: dict[str, list[str]]
) -> None:
    run = run_tiny("quant=FA_linear_mxfp4", *tiny_models["deepseek2_lite"], "capture=off")
    entries = precision(run)["entries"]
    quantised = [e for e in entries if e["format"] != "bf16"]
    few = {e["module"] for e in quantised if e["status"] != "engaged"}
    assert all(name.startswith("expert") for name in few), "with few tokens, or none"
    engaged = {e["module"] for e in quantised} - few
    assert engaged >= {"q-proj", "kv-down", "kv-up", "attention", "proj", "fc1", "fc2"}
    assert engaged >= {"shared-fc1", "shared-fc2"}
    assert any(name.startswith("expert") for name in engaged)


def test_bf16_shows_no_quantised_operand_in_the_router_either(
    run_tiny: RunTiny, tiny_models: dict[str, list[str]]
) -> None:
    run = run_tiny("quant=bf16", *tiny_models["deepseek2_lite"], "capture=off")
    record = precision(run)
    assert record["quantised_calls"] == 0
    assert record["router_calls"] == {"layer 1 router": 3}, "forward, and two in the backward"


def test_a_router_in_low_precision_fails(
    run_tiny: RunTiny, tiny_models: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = router.router_gating_linear

    def quantised(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(quantise(x, "mxfp8", straight_through=True), w, *rest)
        return result

    monkeypatch.setattr(router, "router_gating_linear", quantised)
    words = ["quant=linear_mxfp8", *tiny_models["deepseek2_lite"], "capture=off"]
    status = read_status(run_tiny(*words, expect=1).status)
    assert status is not None
    assert status.state is State.FAILED
    assert (
        "layer 1 router: must be in high precision, an operand is not what entered it"
        in status.reason
    )


def test_recomputed_experts_are_counted_separately(
    run_tiny: RunTiny, tiny_models: dict[str, list[str]]
) -> None:
    words = ["training.recompute=full", "training.iterations=1", "training.warmup_iterations=0"]
    run = run_tiny("quant=FA_linear_hifp8", *tiny_models["deepseek2_lite"], *words)
    entries = [e for e in precision(run)["entries"] if e["status"] != "not_reached"]
    assert {e["product"] for e in entries} >= {"fprop", "dgrad", "wgrad"}
    for entry in entries:
        recomputed = 1 if entry["product"] == "fprop" else 0
        assert (entry["calls"], entry["recomputed_calls"]) == (1, recomputed), entry


def test_a_module_without_a_call_and_one_without_tokens_are_not_reached() -> None:
    assert status_of(None) == (Status.NOT_REACHED, NOT_CALLED)
    assert status_of(SlotCalls(empty_calls=1)) == (Status.NOT_REACHED, NO_TOKENS)


EXPERT = ModuleId(1, "expert0-fc1")
DECLARED = {EXPERT: ModulePrecision(EXPERT, {FPROP_X: resolve("mxfp8_e4m3")})}


def of(status: str, reason: str, calls: int) -> Verdict:
    counts = {"calls": calls, "recomputed_calls": 0, "quantised_calls": calls}
    (entry,) = DECLARED[EXPERT].entries()
    record = {**entry_record(entry), **counts, "status": status, "reason": reason}
    return Verdict(1, [record], [], router_calls={"layer 1 router": 3})


def test_an_expert_with_tokens_on_one_rank_has_that_ranks_status() -> None:
    result = merged(DECLARED, [of("not_reached", NO_TOKENS, 0), of("engaged", "", 2)])
    assert (result.entries[0]["status"], result.entries[0]["calls"]) == ("engaged", 2)
    assert result.router_calls == {"layer 1 router": 6}
    bad = merged(DECLARED, [of("not_reached", NO_TOKENS, 0), of("mismatch", "off the grid", 2)])
    assert (bad.entries[0]["status"], bad.entries[0]["reason"]) == (
        "mismatch",
        "rank 1: off the grid",
    )
    none = merged(DECLARED, [of("not_reached", NO_TOKENS, 0)] * 2)
    assert (none.entries[0]["status"], none.entries[0]["reason"]) == ("not_reached", NO_TOKENS)
