"""Captures of quantised operands: selection, metadata and price."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantexp.capture import open_capture
from quantexp.capture.select.budget import price
from quantexp.capture.select.choice import expected_tensors
from quantexp.cli.plan_record import make_plan
from quantexp.formats import quantise
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

Tiny = Callable[..., Experiment]
RunTiny = Callable[..., RunDir]

LINEAR = {
    *("input_fprop", "weight_fprop", "grad_output_dgrad", "weight_dgrad"),
    *("grad_output_wgrad", "input_wgrad"),
}
ONE_LAYER = ["model.num_layers=1", "capture.stop_after_capture=true"]
#: A global batch of three micro-batches, two of which are captured.
SEVERAL = ["training.global_batch_size=6", "capture.collect_micro_batches=2"]


def lines_of(run: RunDir, name: str = "manifest.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.tensors / name).read_text().splitlines()]


def names(lines: list[dict[str, Any]], **wanted: object) -> set[str]:
    return {m["tensor"] for m in lines if all(m[key] == value for key, value in wanted.items())}


def test_values_are_those_before_quantisation_by_default(run_tiny: RunTiny) -> None:
    lines = lines_of(run_tiny("quant=FA_linear_mxfp8", *ONE_LAYER))
    assert {m["values"] for m in lines} == {"before"}
    assert not any("slot" in m for m in lines)


def test_sums_of_parts_are_captured_before_their_parts_are_taken(run_tiny: RunTiny) -> None:
    """No single tensor is multiplied; the metadata has the parts."""
    run = run_tiny("quant=more/linear_nvfp4_averis", "capture.values=after", *ONE_LAYER)
    lines = lines_of(run)
    tensors = names(lines, module="fc1")
    assert {"input", "grad_output", "weight_fprop", "weight_dgrad"} <= tensors
    assert not tensors & (LINEAR - {"weight_fprop", "weight_dgrad"})
    (line,) = (m for m in lines if (m["module"], m["tensor"]) == ("fc1", "input"))
    (part,) = line["formats"]["fprop.x"]["parts"]
    assert (part["take"], part["along"], part["format"]) == ("mean", "tokens", "bf16")


def test_after_replaces_tensors_that_every_product_quantises(
    run_tiny: RunTiny,
) -> None:
    run = run_tiny("quant=FA_linear_mxfp4", *ONE_LAYER, "capture.values=after")
    lines = lines_of(run)
    linear, attention = (
        [m for m in lines if m["layer_type"] == kind] for kind in ("linear", "attention")
    )
    assert names(linear, values="after") == LINEAR
    assert names(linear, values="scale") == {f"{name}_scale" for name in LINEAR}
    assert names(linear, values="before") == {"output", "grad_input"}
    assert names(attention, values="after") == {"query_fprop", "key_fprop"}
    unquantised = {"value", "output", "grad_output", "grad_query", "grad_key", "grad_value"}
    assert names(attention, values="before") == unquantised
    for m in lines:
        name = Path(m["file"]).name
        assert name.endswith(f"_{m['component']}_mxfp4_{m['tensor']}.pt")
        if m["values"] == "after":
            assert m["formats"][m["slot"]]["format"] == "mxfp4_e2m1"
            assert (m["phase"], m["operation"] == "forward") == ("pre", "fprop" in m["slot"])
            content = torch.load(run.tensors / m["file"], weights_only=True)
            assert content["metadata"]["slot"] == m["slot"]


def test_a_tensor_that_one_product_multiplies_unquantised_stays_beside_its_quantised_form(
    run_tiny: RunTiny,
) -> None:
    scheme = "quant=more/linear_mxfp4_sr_rht"
    lines = lines_of(run_tiny(scheme, *ONE_LAYER, "capture.values=after"))
    linear = [m for m in lines if m["layer_type"] == "linear"]
    assert names(linear, values="after") == LINEAR - {"input_fprop", "weight_fprop"}
    assert names(linear, values="before", operation="forward") == {"input", "weight", "output"}
    assert names(linear, values="before", operation="backward") == {"grad_input"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["quant=FA_linear_mxfp8", "training.recompute=full", "capture.values=both"],
        ["quant=more/linear_mxfp4_sr_rht", "capture.sample_count=5", "capture.values=after"],
        ["quant/pv=nvfp4", "capture.attn_weights=true", "capture.values=after"],
    ],
    ids=["mxfp8", "stochastic", "nvfp4"],
)
def test_the_price_is_exact(run_tiny: RunTiny, tiny: Tiny, words: list[str]) -> None:
    words = [*words, *SEVERAL, *ONE_LAYER]
    lines = lines_of(run_tiny(*words))
    stored = {m["file"]: m["bytes"] for m in lines}
    cost = price(tiny(*words))
    assert (len(stored), sum(stored.values())) == (cost.tensors, cost.num_bytes)
    expected = {
        (t.module.layer, t.module.name, t.operation, t.tensor): t.shape
        for t in expected_tensors(tiny(*words))
    }
    assert expected.keys() == {
        (m["layer"], m["module"], m["operation"], m["tensor"]) for m in lines
    }
    for m in lines:
        shape = expected[m["layer"], m["module"], m["operation"], m["tensor"]]
        assert tuple(m.get("sample", m)["shape"]) == shape
    weights = [m for m in lines if m["tensor"] == "weight_dgrad"]
    times = 2 if "quant=more/linear_mxfp4_sr_rht" in words else 1
    assert set(Counter(m["module"] for m in weights).values()) <= {times}
    assert len({m["hash"] for m in weights}) == len(weights), "each draws its own numbers"


def test_the_price_follows_rules_that_change_the_map(tiny: Tiny) -> None:
    words = ["quant=linear_mxfp8", "capture.values=after", "training.iterations=4"]
    rules = "quant.rules=[{iterations:[2,3],format:bf16}]"
    whole = price(tiny(*words, rules, "capture.iterations=[1-4]"))
    quantised, plain = (price(tiny(*words, rules, f"capture.iterations=[{i}]")) for i in (1, 2))
    assert quantised == price(tiny(*words))
    assert plain.num_bytes < quantised.num_bytes
    assert whole.num_bytes == 2 * quantised.num_bytes + 2 * plain.num_bytes
    assert whole.tensors == 2 * quantised.tensors + 2 * plain.tensors


def test_the_plan_counts_values_and_scales_by_hand(tiny: Tiny) -> None:
    words = ["quant=linear_mxfp8", "capture.rules=[{modules:[attention],level:off}]"]
    before = make_plan(tiny(*words))
    after = make_plan(tiny(*words, "capture.values=after"))
    tokens, hidden, ffn, heads = 64 * 2, 128, 192, 4 * 32
    shapes = [(heads + 2 * 64, hidden), (hidden, heads), (2 * ffn, hidden), (hidden, ffn)]
    once = sum(tokens * (2 * i + 2 * o) + o * i for o, i in shapes)
    assert before.capture_bytes == 2 * 2 * once
    twice = sum(tokens * (2 * i + 2 * o) + 2 * o * i for o, i in shapes)  # x, g and w twice each
    results = sum(tokens * (i + o) for o, i in shapes)
    assert after.capture_bytes == 2 * (2 * (twice + results) + twice // 32)
    assert (before.capture_tensors, after.capture_tensors) == (2 * 4 * 5, 2 * 4 * (6 + 6 + 2))


def test_rules_choose_an_operand_by_its_own_name_and_by_its_tensors(run_tiny: RunTiny) -> None:
    rules = (
        "[{level:off},{tensors:[input_wgrad],values:both,level:tensors},"
        "{modules:[fc1],tensors:[weight],values:after,level:tensors,sample_count:40,"
        "sample_of:rows},{modules:[qkv],tensors:[grad_output],values:both,level:stats}]"
    )
    run = run_tiny("quant=linear_mxfp8", *ONE_LAYER, f"capture.rules={rules}")
    lines, judged = lines_of(run), lines_of(run, "statistics.jsonl")
    assert names(lines, module="qkv") == {"input_wgrad", "input_wgrad_scale"}
    weights = {"weight_fprop", "weight_dgrad", "weight_fprop_scale", "weight_dgrad_scale"}
    assert names(lines, module="fc1") == weights | {"input_wgrad", "input_wgrad_scale"}
    gradients = {"grad_output_dgrad", "grad_output_wgrad"}
    gradients |= {"grad_output", *(f"{name}_scale" for name in gradients)}
    qkv = names(judged, module="qkv", layer=0)
    assert qkv == {"input_wgrad", "input_wgrad_scale"} | gradients
    sampled = {m["tensor"]: m for m in lines if m["module"] == "fc1" and "weight" in m["tensor"]}
    rows = sampled["weight_dgrad"]["sample"]["indices"]
    assert len(rows) == 40
    along_width, along_rows = (sampled[f"weight_{p}_scale"] for p in ("fprop", "dgrad"))
    assert along_width["sample"]["indices"] == rows
    assert along_width["shape"] == [40, 4]
    assert along_rows["sample"]["indices"] == sorted({row // 32 for row in rows})
    assert along_rows["sample"]["shape"] == [12, 128]


def test_statistics_alone_keep_operands_and_scales_without_files(
    run_tiny: RunTiny, tiny: Tiny
) -> None:
    words = ["quant=linear_hifp8", "quant/qk=mxfp8", *ONE_LAYER]
    words += ["capture=stats", "capture.values=after"]
    run = run_tiny(*words)
    assert not list(run.tensors.rglob("*.pt"))
    judged = lines_of(run, "statistics.jsonl")
    assert len(judged) == price(tiny(*words)).statistics
    assert names(judged, module="fc2", values="after") == LINEAR
    assert not names(judged, module="fc2", values="scale"), "one scale a tensor, in the metadata"
    scales = {m["tensor_scale"] for m in judged if m["module"] == "fc2" and m["values"] == "after"}
    assert all(np.frexp(scale)[0] == 0.5 for scale in scales)
    assert names(judged, module="attention", values="scale") == {
        "query_fprop_scale",
        "key_fprop_scale",
    }


def test_operands_are_selected_by_their_kind_of_values_and_have_their_statistics(
    run_tiny: RunTiny,
) -> None:
    run = run_tiny("quant=linear_mxfp8", *ONE_LAYER, "capture.values=both")
    capture = open_capture(run.tensors)
    (x,) = capture.select(layer=0, module="qkv", slot="fprop.x", values="after")
    (scale,) = capture.select(layer=0, module="qkv", slot="fprop.x", values="scale")
    assert (x.label, scale.label) == (
        "L0 qkv forward input_fprop",
        "L0 qkv forward input_fprop_scale",
    )
    codes = x.torch().double() / torch.exp2(scale.torch().double() - 127).repeat_interleave(32, -1)
    assert torch.equal(codes.to(torch.float8_e4m3fn).double(), codes), "elements of E4M3"
    assert codes.abs().max() <= 448
    _statistics_are_those_of_the_values(run)


def _statistics_are_those_of_the_values(run: RunDir) -> None:
    for m in lines_of(run):
        if m["module"] != "proj" or m["values"] == "before":
            continue
        x = torch.load(run.tensors / m["file"], weights_only=True)["tensor"].double()
        if m["values"] == "scale":
            x = torch.exp2(x - 127)
        s = m["statistics"]
        assert (s["count"], s["min"], s["max"]) == (x.numel(), x.min().item(), x.max().item())
        exponents = np.frexp(x[x != 0].abs().numpy())[1] - 1
        counted = s["log2_magnitude"]
        first = counted["first"] or 0
        for exponent in range(first, first + len(counted["counts"])):
            assert counted["counts"][exponent - first] == (exponents == exponent).sum()


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_weight_drawn_once_a_step_records_which_random_numbers_it_has(
    run_tiny: RunTiny, is_kept: bool
) -> None:
    """Seed and offset in its metadata reproduce each micro-batch's copy to the last bit."""
    words = [f"quant.linear.{product}.w.rounding=stochastic" for product in ("fprop", "dgrad")]
    words += [f"training.weight_cache={str(is_kept).lower()}", "capture.values=both"]
    run = run_tiny("quant=linear_mxfp4", *words, *ONE_LAYER, *SEVERAL)
    lines = [m for m in lines_of(run) if m["module"] == "fc1"]
    (w,) = (m["file"] for m in lines if (m["tensor"], m["operation"]) == ("weight", "forward"))
    weight = torch.load(run.tensors / w, weights_only=True)["tensor"]
    offsets = []
    for m in lines:
        if m["tensor"] in ("weight_fprop", "weight_dgrad"):
            slot = m["formats"][m["slot"]]
            drawn = {"seed": slot["seed"], "offset": slot["offset"], "rounding": "stochastic"}
            copy = torch.load(run.tensors / m["file"], weights_only=True)["tensor"]
            assert torch.equal(copy, quantise(weight, "mxfp4", axis=m["dim"], **drawn))
            offsets.append(slot["offset"])
    first = 1 << 32
    assert sorted(offsets) == ([first] * 4 if is_kept else [first, first, first + 1, first + 1])


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["mxfp8", "hifp8"])
def test_captured_copies_are_not_overwritten_later(run_tiny: RunTiny, fmt: str) -> None:
    """Copies of weights and gradients reuse memory, except for those that are captured."""
    words = ["capture.values=both", "capture.control_iter=0", "training.iterations=3"]
    run = run_tiny(f"quant=linear_{fmt}", *words, "training.global_batch_size=4")
    lines = [m for m in lines_of(run) if m["layer_type"] == "linear"]
    before = {}
    for m in lines:
        if m["values"] == "before":
            key = (m["layer"], m["module"], m["iteration"], m["micro_batch"], m["tensor"])
            before[key] = m["file"]
    checked = Counter[str]()
    for m in lines:
        if m["values"] != "after":
            continue
        place = (m["layer"], m["module"], m["iteration"])
        source = before[*place, m["micro_batch"], m["source"]]
        x, copy = (
            torch.load(run.tensors / file, weights_only=True)["tensor"]
            for file in (source, m["file"])
        )
        slot = m["formats"][m["slot"]]
        names = ("scale_rule", "scaling", "amax_target", "rounding")
        options = {name: slot[name] for name in names if slot[name] is not None}
        assert torch.equal(copy, quantise(x, fmt, axis=m["dim"], **options)), m["file"]
        checked[m["tensor"]] += 1
    assert set(checked) == LINEAR
    assert min(checked.values()) == 3 * 8, "three iterations of eight layers"
