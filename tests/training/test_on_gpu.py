"""Whole tiny runs on a GPU, one rank over NCCL: proved, and repeated bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantexp.model.checkpoints import folder_of
from quantexp.runs.paths import RunDir
from tests.recorded import json_lines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
RunTiny = Callable[..., RunDir]


@pytest.mark.parametrize("model", ["llama32-1b", "deepseek2_lite"])
@pytest.mark.parametrize(
    "scheme", ["FA_linear_mxfp8", "FA_linear_hifp8", "more/linear_mxfp4_sr_rht"]
)
def test_every_slot_engages(
    run_tiny: RunTiny, tiny_models: dict[str, list[str]], model: str, scheme: str
) -> None:
    run = run_tiny(*tiny_models[model], f"quant={scheme}", "capture=stats")
    statuses = {entry["status"] for entry in json.loads(run.precision.read_text())["entries"]}
    assert "mismatch" not in statuses
    assert "engaged" in statuses
    assert json_lines(run.metrics)[-1]["memory_gb"] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_deterministic_run_repeats_its_numbers(
    run_tiny: RunTiny, tmp_path: Path, precision: str
) -> None:
    words = [f"training.precision={precision}", "quant=FA_linear_mxfp8", "capture=tensors"]
    words += ["training.deterministic=true", "training.iterations=4"]
    words += ["checkpoint.at_end=true", "checkpoint.optimizer=true"]
    runs = [run_tiny(*words, f"paths.root={tmp_path / str(turn)}") for turn in range(2)]
    names = ("loss", "grad_norm", "lr", "loss_scale")
    numbers = [[[line[name] for name in names] for line in json_lines(run.metrics)] for run in runs]
    assert numbers[0] == numbers[1]
    hashes = [(folder_of(run, 4) / "hashes.json").read_bytes() for run in runs]
    assert hashes[0] == hashes[1]


def test_output_layer_and_moments_are_proved(run_tiny: RunTiny) -> None:
    run = run_tiny(
        *("quant=linear_mxfp8", "quant/output=mxfp8", "capture=off"),
        *(
            "quant.optimizer.exp_avg.format=fp8_1x128",
            "quant.optimizer.exp_avg.rounding=stochastic",
        ),
        "quant.optimizer.exp_avg_sq.format=fp16_scaled",
    )
    precision = json.loads(run.precision.read_text())
    assert precision["proved"]
    sites = {entry["site"] for entry in precision["entries"] if entry["status"] == "engaged"}
    assert {"linear", "output", "optimizer"} <= sites
