"""Every scheme of `quant/more` trains and is proved, and its options take effect in the products."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import quantexp.quant.multiply
from quantexp.folders import conf_dir
from quantexp.formats import QuantSpec, quantise
from quantexp.formats.declared import arithmetic, levels
from quantexp.formats.declared.arithmetic import on_elements
from quantexp.formats.declared.levels import _on_grid as on_grid
from quantexp.formats.types import Choose
from quantexp.quant.multiply import quantise_operand
from quantexp.quant.step_state import StepState
from quantexp.runs.paths import RunDir
from tests.shipped import words_of

from .test_engagement import failure, precision, quantise_linear_operands

pytestmark = pytest.mark.slow

RunTiny = Callable[..., RunDir]
#: Those of Transformer Engine need a GPU.
SCHEMES = sorted(
    file.stem
    for file in (conf_dir() / "quant" / "more").glob("*.yaml")
    if not file.stem.startswith("te_")
)
ONE_STEP = ("training.iterations=1", "training.warmup_iterations=0", "capture=off")
SR_RHT = "quant=more/linear_mxfp4_sr_rht"


def losses(run: RunDir) -> list[Any]:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_trains_with_its_engagement_proved(run_tiny: RunTiny, scheme: str) -> None:
    keeps_ends = scheme in (
        "linear_nvfp4_recipe",
        "linear_nvfp4_four_over_six",
        "linear_nvfp4_of_forward",
        "linear_nvfp4_recipe_late_bf16",
    )
    layers = ["model.num_layers=3"] if keeps_ends else []
    # Of three iterations the last tenth is none.
    length = 5 if scheme == "linear_nvfp4_recipe_late_bf16" else 3
    words = (*words_of(f"more/{scheme}"), *layers, f"training.iterations={length}", "capture=off")
    run = run_tiny(*words)
    record = precision(run)
    assert record["scheme"] == scheme
    assert record["proved"]
    assert len(losses(run)) == length
    quantised = [e for e in record["entries"] if e["format"] != "bf16"]
    # Gains begin at 1, which every format has.
    gains = [e for e in quantised if e["site"] == "norm" and e["operand"] == "w"]
    assert all(e["reason"] == "on the grid anyway" for e in gains)
    # An observation takes 50 iterations.
    resets = [e for e in quantised if e["product"] == "reset"]
    assert all(e["reason"] == "the training ends before the first reset" for e in resets)
    others = [e for e in quantised if e not in gains + resets]
    others += [e for e in record["entries"] if e.get("unnormalised") and e not in others]
    assert {e["status"] for e in others} == {"engaged"}
    assert all(e["quantised_calls"] for e in quantised if e in others)
    assert not any(e["quantised_calls"] for e in record["entries"] if e["format"] == "bf16")


@pytest.mark.parametrize("precision_", ["fp16", "fp32"])
@pytest.mark.parametrize(
    "scheme",
    [
        *("linear_nvfp4_recipe", "linear_mxfp4_sr_rht", "linear_fp8", "FA_linear_nvfp4"),
        *("linear_fp8_block", "linear_fp4_ue5m3", "linear_mxfp4_quartet"),
        *("linear_nvfp4_averis", "linear_nvfp4_hot_channels", "linear_mxfp4_outliers"),
        *("FA_mxint8_smooth_k", "linear_nvfp4_metis", "FA_bf16_flash_raised_max"),
    ],
)
def test_other_working_precisions_are_proved_too(
    run_tiny: RunTiny, scheme: str, precision_: str
) -> None:
    run = run_tiny(
        f"quant=more/{scheme}",
        "quant.rules=[]",
        f"training.precision={precision_}",
        "training.initial_loss_scale=1024",
        *ONE_STEP,
    )
    assert precision(run)["proved"]


@pytest.mark.parametrize("scheme", ["linear_hifp8_delayed", "linear_fp8_delayed"])
def test_delayed_scales_are_proved_in_later_iterations(run_tiny: RunTiny, scheme: str) -> None:
    """A rule that begins and ends causes iterations 3 and 4 to be watched, when there is a history."""
    run = run_tiny(
        f"quant=more/{scheme}",
        "quant.rules=[{iterations: [3, 3], layers: [0], modules: [fc2], format: bf16}]",
        "training.iterations=4",
        "training.lr=0.01",
        "capture=off",
    )
    record = precision(run)
    assert record["proved"]
    assert [e["iteration"] for e in record["earlier"]] == [1, 3]
    assert {e["status"] for e in record["entries"] if e["format"] != "bf16"} == {"engaged"}


def test_a_scale_of_its_own_in_place_of_the_delayed_one_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepState, "amax_for", lambda self, spec, x: torch.tensor(1e3))
    reason = failure(run_tiny("quant=more/linear_hifp8_delayed", *ONE_STEP, expect=1))
    assert "declared hifp8" in reason
    assert "elements are not those of its source" in reason


@pytest.mark.parametrize("fault", ["six alone", "another error", "the worse"])
def test_a_block_under_another_of_its_scales_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    tried, error = arithmetic.candidates, arithmetic._error
    if fault == "six alone":
        monkeypatch.setattr(arithmetic, "candidates", lambda *given: tried(*given)[:1])
    elif fault == "another error":
        monkeypatch.setattr(
            arithmetic, "_error", lambda x, d, element, _: error(x, d, element, Choose.MAX)
        )
    else:
        monkeypatch.setattr(arithmetic, "_error", lambda *given: -error(*given))
    words = ("quant=more/linear_nvfp4_four_over_six", "quant.rules=[]")
    reason = failure(run_tiny(*words, *ONE_STEP, expect=1))
    assert re.search(r"declared nvfp4_four_over_six, \d+ of \d+ elements are not", reason)


@pytest.mark.parametrize(
    ("scheme", "declared", "name", "fault"),
    [
        ("if4", "if4", "on_elements", lambda v, _, *rest: on_elements(v, None, *rest)),
        ("hifloat4", "hifloat4", "_with_micro_exponents", lambda _, d, *rest: d),
        ("nvfp4_quartet2", "nvfp4_ms_eden", "_correction", lambda v, *_: torch.ones(())),
        (
            *("nvfp4_quartet2", "nvfp4_ms_eden", "_on_grid"),
            lambda target, scale, random: on_grid(target, scale, None),
        ),
    ],
    ids=["one grid alone", "no micro-exponents", "no correction", "scales to nearest"],
)
def test_a_level_of_scales_left_out_fails(
    run_tiny: RunTiny,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    declared: str,
    name: str,
    fault: Callable[..., Tensor],
) -> None:
    monkeypatch.setattr(levels, name, fault)
    words = (f"quant=more/linear_{scheme}", "quant.rules=[]")
    reason = failure(run_tiny(*words, *ONE_STEP, expect=1))
    assert re.search(rf"declared {declared}, \d+ of \d+ elements are not", reason)


def test_stochastic_rounding_of_what_remains_is_proved(run_tiny: RunTiny) -> None:
    words = [f"quant.linear.{slot}.g.rounding=stochastic" for slot in ("dgrad", "wgrad")]
    run = run_tiny("quant=more/linear_nvfp4_averis", *words, *ONE_STEP)
    assert precision(run)["proved"]


def test_a_transform_of_a_key_without_its_mean_is_proved(run_tiny: RunTiny) -> None:
    words = [f"quant.qk.fprop.{name}.hadamard=random" for name in "qk"]
    reuse = [f"quant.qk.{slot}.format=bf16" for slot in ("dgrad_q.k", "dgrad_k.q")]
    run = run_tiny("quant=more/FA_mxint8_smooth_k", *words, *reuse, *ONE_STEP)
    assert precision(run)["proved"]


def without_transform(x: Tensor, operand: QuantSpec, axis: int) -> Tensor:
    if not operand.is_transformed:
        return quantise_operand(x, operand, axis)
    return quantise(x, operand.fmt, axis=axis, scale_rule="floor")


@pytest.mark.parametrize("kind", ["deterministic", "random"])
def test_an_operand_without_its_transform_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    quantise_linear_operands(monkeypatch, without_transform)
    words = [f"quant.linear.wgrad.{name}.hadamard={kind}" for name in "gx"]
    reason = failure(run_tiny("quant=linear_mxfp4", *words, *ONE_STEP, expect=1))
    assert re.search(r"linear.wgrad.g: declared mxfp4_e2m1, \d+ of \d+ elements are not", reason)


def test_a_transform_with_other_signs_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_signs(x: Tensor, operand: QuantSpec, axis: int) -> Tensor:
        flipped = x.clone()
        flipped.select(axis, 0).neg_()
        flipped.select(axis, 1).neg_()
        return quantise_operand(-x if operand.left else flipped, operand, axis)

    quantise_linear_operands(monkeypatch, other_signs)
    reason = failure(run_tiny(SR_RHT, *ONE_STEP, expect=1))
    assert re.search(r"linear.wgrad.g: declared mxfp4_e2m1, \d+ of \d+ elements are not", reason)


@pytest.mark.parametrize("slot", ["dgrad.g", "wgrad.x"])
def test_the_originals_in_place_of_stochastic_operands_fail(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, slot: str
) -> None:
    def original_of(x: Tensor, operand: QuantSpec, axis: int) -> Tensor:
        return x if operand.stream.endswith(slot) else quantise_operand(x, operand, axis)

    quantise_linear_operands(monkeypatch, original_of)
    reason = failure(run_tiny(SR_RHT, *ONE_STEP, expect=1))
    assert f"linear.{slot}: declared mxfp4_e2m1" in reason
    assert "are not those of its source: it is not quantised" in reason


@pytest.mark.parametrize(
    ("scheme", "declared", "other"),
    [
        ("linear_nvfp4", "nvfp4_e2m1", "mxfp4"),
        ("linear_fp8", "fp8_e4m3", "mxfp8"),
        ("linear_mxfp6", "mxfp6_e2m3", "mxfp4"),
    ],
)
def test_another_format_than_the_declared_one_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, scheme: str, declared: str, other: str
) -> None:
    quantise_linear_operands(monkeypatch, lambda x, operand, axis: quantise(x, other, axis=axis))
    reason = failure(run_tiny(f"quant=more/{scheme}", *ONE_STEP, expect=1))
    assert f"linear.fprop.w: declared {declared}" in reason


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_e4m3", "mxfp6_e2m3"])
def test_a_bf16_baseline_in_a_later_format_fails(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, fmt: str
) -> None:
    monkeypatch.setattr(
        quantexp.quant.multiply,
        "quantise_operand",
        lambda x, operand, axis, *_, **__: quantise(x, fmt, axis=axis),
    )
    reason = failure(run_tiny("quant=bf16", *ONE_STEP, expect=1))
    assert "declared bf16" in reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    [
        *("linear_mxfp4_sr_rht", "linear_nvfp4_recipe", "linear_hifp8_delayed"),
        *("linear_mxfp4_quartet", "linear_nvfp4_of_forward", "linear_nvfp4_quartet2"),
        *("linear_nvfp4_averis", "FA_mxint8_smooth_k", "FA_bf16_flash_raised_max"),
    ],
)
def test_a_run_repeats_and_recomputation_changes_nothing(run_tiny: RunTiny, scheme: str) -> None:
    words = [
        f"quant=more/{scheme}",
        "quant.rules=[]",
        "training.iterations=3",
        "training.global_batch_size=4",
        "capture=off",
    ]
    once = losses(run_tiny(*words))
    assert losses(run_tiny(*words, "force=true")) == once
    assert losses(run_tiny(*words, "training.recompute=full")) == once


def test_a_forward_copy_that_the_backward_recomputes_repeats_its_numbers(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands: dict[str, list[Tensor]] = {}

    def record(x: Tensor, operand: QuantSpec, axis: int, *rest: Any, **keywords: Any) -> Tensor:
        y = quantise_operand(x, operand, axis, *rest, **keywords)
        operands.setdefault(operand.stream, []).append(y)
        return y

    monkeypatch.setattr(quantexp.quant.multiply, "quantise_operand", record)
    run_tiny("quant=FA_mxfp4", "quant.qk.rounding=stochastic", *ONE_STEP)
    for name in ("q", "k"):
        forward, backward = operands[f"layer 0 attention qk.fprop.{name}"]
        assert torch.equal(forward, backward)
        assert not torch.equal(forward, operands[f"layer 1 attention qk.fprop.{name}"][0])
