"""Levels and samples of captured tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantexp.capture.select.budget import price
from quantexp.capture.select.choice import expected_tensors, sample_of, sampled_shape
from quantexp.capture.select.rules import take
from quantexp.errors import ConfigError
from quantexp.quant.precision import ModuleId
from quantexp.runs.paths import RunDir
from quantexp.schema import CaptureConfig, CaptureLevel, CaptureRule, Experiment, SampleOf

Tiny = Callable[..., Experiment]
OFF, STATS, TENSORS = CaptureLevel.off, CaptureLevel.stats, CaptureLevel.tensors


def level(
    rules: list[CaptureRule], layer: int = 0, tensor: str = "input", **keys: Any
) -> CaptureLevel:
    config = CaptureConfig(rules=rules, **{"level": TENSORS, **keys})
    operation = "backward" if "grad" in tensor else "forward"
    return take(config, 4, ModuleId(layer, "fc1"), operation, tensor).level


def test_the_later_rule_wins() -> None:
    rules = [CaptureRule(level=STATS), CaptureRule(tensors=["in*"], level=TENSORS)]
    assert level(rules) is TENSORS
    assert level(rules, tensor="output") is STATS
    assert level(rules[::-1]) is STATS


@pytest.mark.parametrize(
    ("rule", "applies"),
    [
        (CaptureRule(layers=[-1]), False),
        (CaptureRule(layers=[-4, 2]), True),
        (CaptureRule(modules=["fc*"]), True),
        (CaptureRule(modules=["attention"]), False),
        (CaptureRule(operations=["backward"]), False),
        (CaptureRule(operations=["forward"], tensors=["input"]), True),
    ],
)
def test_a_rule_applies_where_all_its_keys_match(rule: CaptureRule, applies: bool) -> None:
    rule.level = OFF
    assert (level([rule]) is OFF) is applies


def test_tensors_captured_on_request_need_their_name() -> None:
    assert level([CaptureRule(level=STATS)], tensor="grad_weight") is OFF
    assert level([CaptureRule(tensors=["grad_w*"], level=STATS)], tensor="grad_weight") is STATS
    assert level([], tensor="grad_weight", weight_grads=True) is TENSORS
    for name in ("resid_mid", "grad_resid_post"):
        assert level([], tensor=name) is OFF
        assert level([], tensor=name, residual=True) is TENSORS
        assert level([CaptureRule(tensors=["*resid_*"], level=STATS)], tensor=name) is STATS
    off = {"tensors": ["*"], "level": TENSORS}
    assert level([CaptureRule(**off)], level=OFF) is OFF  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            "{layers: [0]}",
            "must say what it changes: level, values, sample_count or sample_of; got none",
        ),
        ("{layers: [9], level: stats}", "layers must lie between -2 and 1 for 2 layers, got 9"),
        ("{modules: [mlp], level: stats}", "modules must match one of qkv, attention, .*'mlp'"),
        ("{operations: [pre], level: stats}", "operations must match one of forward, backward"),
        ("{tensors: [x], level: stats}", "tensors must match one of input, weight, .*got 'x'"),
        (
            "{tensors: ['*_wgrad'], level: stats}",
            r"tensors names operands after quantisation \(\*_wgrad\), .* add values: both",
        ),
        ("{sample_count: -1}", "sample_count must be at least 0, got -1"),
    ],
)
def test_an_impossible_rule_is_refused(tiny: Tiny, rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"capture.rules\[0\].*{message}"):
        tiny(f"capture.rules=[{rule}]".replace(": ", ":"))


WGRADS = "{tensors:['*_wgrad'],level:stats}"


@pytest.mark.parametrize(
    "words",
    [
        ["capture.values=after", f"capture.rules=[{WGRADS}]"],
        [f"capture.rules=[{{values:both}},{WGRADS}]"],
    ],
)
def test_a_rule_for_quantised_operands_is_valid_where_they_are_captured(
    tiny: Tiny, words: list[str]
) -> None:
    expected = expected_tensors(tiny("quant=linear_mxfp8", *words))
    levels = {each.tensor: each.take.level for each in expected}
    assert (levels["input_wgrad"], levels["input_fprop"]) == (STATS, TENSORS)


def test_a_misspelt_key_of_a_rule_is_named(tiny: Tiny) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key capture.rules\[0\].layer; did you mean lay"
    ):
        tiny("capture.rules=[{layer:[0],level:stats}]")


@pytest.mark.parametrize(
    ("shape", "tensor", "of", "count", "expected"),
    [
        ((100, 2, 8), "input", SampleOf.rows, 10, (10, 2, 8)),
        ((100, 2, 8), "input", SampleOf.blocks, 4, (100, 2, 8)),
        ((128, 2, 8), "input", SampleOf.blocks, 2, (64, 2, 8)),
        ((100, 2, 8), "input", SampleOf.heads, 2, (100, 2, 8)),
        ((100, 2, 8, 4), "query", SampleOf.heads, 2, (100, 2, 2, 4)),
        ((2, 8, 9, 9), "attn_weights", SampleOf.heads, 3, (2, 3, 9, 9)),
        ((2, 8, 9, 9), "grad_scores", SampleOf.heads, 3, (2, 3, 9, 9)),
        ((5,), "input", SampleOf.rows, 0, (5,)),
    ],
)
def test_a_sample_has_so_many_of_its_units(
    shape: tuple[int, ...], tensor: str, of: SampleOf, count: int, expected: tuple[int, ...]
) -> None:
    sample = sample_of(shape, tensor, of, count)
    assert sampled_shape(shape, sample) == expected
    assert sample == sample_of(shape, tensor, of, count)
    if sample is not None:
        assert sample["indices"] == sorted(set(sample["indices"]))
        assert 0 <= sample["indices"][0] <= sample["indices"][-1] < shape[sample["axis"]]


def test_tensors_of_one_extent_keep_the_same_rows() -> None:
    samples = [sample_of((64, n), "input", SampleOf.rows, 5) for n in (3, 4)]
    assert samples[0]
    assert samples[1]
    assert samples[0]["indices"] == samples[1]["indices"]


def test_a_run_keeps_what_rules_and_sample_select_at_the_predicted_price(
    run_tiny: Callable[..., RunDir], tiny: Tiny
) -> None:
    words = [
        "capture.sample_count=8",
        "capture.rules=[{modules:[fc2],level:stats},{tensors:[grad_*],level:off},"
        "{layers:[-1],tensors:[main_grad],level:tensors,sample_count:0},"
        "{operations:[forward],tensors:[weight],level:off}]",
    ]
    run = run_tiny(*words)
    lines, judged = (
        [json.loads(line) for line in (run.tensors / name).read_text().splitlines()]
        for name in ("manifest.jsonl", "statistics.jsonl")
    )
    assert "fc2" not in {line["module"] for line in lines if line["tensor"] != "main_grad"}
    assert "fc2" in {line["module"] for line in judged}
    grads = {(line["layer"], line["tensor"]) for line in lines if "grad" in line["tensor"]}
    assert grads == {(1, "main_grad")}
    weights = [line for line in lines if line["tensor"] == "weight"]
    assert {line["operation"] for line in weights} == {"backward"}
    for line in lines:
        x = torch.load(run.tensors / line["file"], weights_only=True)["tensor"]
        assert list(x.shape) == line["shape"]
        assert line["tensor"] == "main_grad" or line["shape"][0] == 8
        assert line["statistics"]["count"] >= x.numel()
    stored = {line["file"]: line["bytes"] for line in lines}
    assert sum(stored.values()) == price(tiny(*words)).num_bytes
