"""Captures of latent attention, experts and their routers, and their price."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantexp.capture.select.budget import price
from quantexp.capture.select.choice import expected_tensors
from quantexp.errors import ConfigError
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

pytestmark = pytest.mark.slow

RunTiny = Callable[..., RunDir]
Tiny = Callable[..., Experiment]


def manifest(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.tensors / "manifest.jsonl").read_text().splitlines()]


def test_bytes_are_exact_however_the_tokens_are_spread_over_the_experts(
    run_tiny: RunTiny, tiny: Tiny, tiny_models: dict[str, list[str]]
) -> None:
    words = [
        *tiny_models["deepseek2_lite"],
        *("quant=linear_mxfp8", "capture.router_logits=true", "capture.residual=true"),
        *("capture.attn_weights=true", "training.global_batch_size=4", "capture.control_iter=2"),
    ]
    run = run_tiny(*words)
    stored = {line["file"]: line["bytes"] for line in manifest(run)}
    assert sum(stored.values()) == price(tiny(*words)).num_bytes
    shapes = {
        (e.module.layer, e.module.name, e.operation, e.tensor): e.shape
        for e in expected_tensors(tiny(*words))
    }
    for line in manifest(run):
        shape = shapes[line["layer"], line["module"], line["operation"], line["tensor"]]
        if line["module"].startswith("expert") and line["tensor"] != "weight":
            assert (len(line["shape"]), line["shape"][1]) == (2, shape[1])
            assert len(line["row_sequences"]) == line["shape"][0]
        else:
            assert tuple(line["shape"]) == shape, line
            assert "row_sequences" not in line


def test_names_and_metadata_of_experts_latents_and_routers(
    run_tiny: RunTiny, tiny_models: dict[str, list[str]]
) -> None:
    words = [
        "quant=FA_linear_mxfp8",
        "capture.router_logits=true",
        "capture.stop_after_capture=true",
    ]
    run = run_tiny(*tiny_models["deepseek2_lite"], *words)
    names = {line["file"].partition("_")[2].split("_", 2)[2] for line in manifest(run)}
    assert {
        "linear_L0-kv-down_forward_pre_linear_mxfp8_input.pt",
        "linear_L0-kv-up_backward_post_linear_mxfp8_grad_input.pt",
        "linear_L1-q-proj_forward_post_linear_mxfp8_output.pt",
        "linear_L1-shared-fc2_backward_pre_linear_mxfp8_grad_output.pt",
        "attention_L1_forward_pre_FA_mxfp8_value.pt",
        "router_L1_forward_post_router_bf16_router_logits.pt",
        "router_L1_backward_pre_router_bf16_grad_router_logits.pt",
    } <= names
    assert any(name.startswith("linear_L1-expert") for name in names)
    router = next(line for line in manifest(run) if line["module"] == "router")
    assert (router["dtype"], router["formats"], router["shape"]) == ("float32", {}, [64, 2, 4])


def test_one_sequence_needs_no_metadata_about_rows(
    run_tiny: RunTiny, tiny_models: dict[str, list[str]]
) -> None:
    words = ["training.micro_batch_size=1", "capture.stop_after_capture=true"]
    run = run_tiny(*tiny_models["deepseek2_lite"], *words)
    lines = [line for line in manifest(run) if line["module"].startswith("expert")]
    assert lines
    assert not any("row_sequences" in line for line in manifest(run))


def test_quantised_operands_of_the_product_over_tokens_lie_by_sequence(
    run_tiny: RunTiny, tiny_models: dict[str, list[str]]
) -> None:
    words = ["quant=linear_mxfp8", "capture.values=both", "capture.stop_after_capture=true"]
    run = run_tiny(*tiny_models["deepseek2_lite"], *words)
    lines = {(line["module"], line["tensor"]): line for line in manifest(run)}
    name = next(module for module, _ in lines if module.startswith("expert"))
    rows = lines[name, "input"]["row_sequences"]
    longest = max(rows.count(0), rows.count(1))
    operand = lines[name, "input_wgrad"]
    assert (operand["shape"][:2], operand["dim"]) == ([longest, 2], 0)
    scales = lines[name, "input_wgrad_scale"]
    assert scales["shape"] == [-(-longest // 32), 2, operand["shape"][2]]
    x = torch.load(run.tensors / lines[name, "input"]["file"], weights_only=True)["tensor"]
    y = torch.load(run.tensors / operand["file"], weights_only=True)["tensor"]
    own = x[torch.tensor(rows) == 1].float()
    # E4M3 has 4 significant bits: within 2^-4 of a normal value; what is small beside its block may vanish.
    assert torch.allclose(
        y[: len(own), 1].float(), own, rtol=2.0**-4, atol=2.0**-9 * float(own.abs().max())
    )
    fprop = lines[name, "input_fprop"]
    assert (fprop["shape"], fprop["dim"]) == (lines[name, "input"]["shape"], 1)


def test_router_logits_need_a_router(tiny: Tiny) -> None:
    with pytest.raises(
        ConfigError,
        match=r"capture\.router_logits needs a model with experts \(model\.moe\), and llama32-1b has none",
    ):
        tiny("capture.router_logits=true")


def test_a_rule_takes_a_router_by_name(tiny: Tiny, tiny_models: dict[str, list[str]]) -> None:
    rule = "capture.rules=[{modules: [router], tensors: [router_logits], level: stats}]"
    experiment = tiny(*tiny_models["deepseek2_lite"], rule)
    routers = [e for e in expected_tensors(experiment) if e.module.name == "router"]
    assert [(e.module.layer, e.tensor, e.take.level.value) for e in routers] == [
        (1, "router_logits", "stats")
    ]
