"""Whole runs on Transformer Engine's linear layers, from configuration to proof, with Python in place of kernels."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.capture.reader import open_capture
from quantexp.runs.paths import RunDir
from tests.conftest import run_here
from tests.extras.transformer_engine.rank.child import H100, Child

NATIVE, OWN = "quant.backend=transformer_engine", "quant.backend=te_emulated"


def run(folder: Path, cache: str, *words: str) -> dict[str, Any]:
    """Train, prove and capture in the child; the metrics, the precision map and the captured tensors of the run."""
    from megatron.core import optimizer

    from quantexp.config.compose import compose
    from quantexp.launch.attempt import open_run
    from quantexp.training.megatron import session
    from quantexp.training.worker import Worker
    from tests.conftest import TINY
    from tests.extras.transformer_engine.rank import kernels

    kernels.install()
    vars(session)["cpu_device"] = contextlib.nullcontext  # the child is inside it already
    optimizer.USING_PYTORCH_OPTIMIZER = True  # not Transformer Engine's fused Adam, a kernel
    paths = [f"paths.root={folder}", cache]
    base = [*TINY, *paths, "training.micro_batch_size=1", "training.global_batch_size=2"]
    experiment = compose([*base, *words], None, {})
    with open_run(experiment, "cpu", ["test"]) as (opened, _):
        code = Worker(opened.run, experiment).run()
    status = json.loads(opened.run.status.read_text())
    lines = (
        [json.loads(line) for line in opened.run.metrics.read_text().splitlines()]
        if code == 0
        else []
    )
    return {
        "reason": status["reason"] if code else None,
        "losses": [
            (line["loss"], line["grad_norm"], line.get("validation_loss")) for line in lines
        ],
        "precision": json.loads(opened.run.precision.read_text()) if code == 0 else None,
        "root": str(opened.run.root),
    }


@pytest.fixture
def emulated(tiny: Any) -> Callable[..., RunDir]:
    """The same run without Transformer Engine, in this process."""

    def make(*words: str) -> RunDir:
        one = ("training.micro_batch_size=1", "training.global_batch_size=2")
        return run_here(tiny(*one, *words))

    return make


def measured(run: RunDir) -> list[tuple[float, float, float | None]]:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [(line["loss"], line["grad_norm"], line.get("validation_loss")) for line in lines]


def captured(run: RunDir) -> dict[tuple[object, ...], Tensor]:
    """The captured tensors by what they are."""
    keys = ("layer", "module", "operation", "phase", "tensor", "iteration", "micro_batch")
    return {
        tuple(each.metadata.get(key) for key in keys): each.torch()
        for each in open_capture(run.root).with_values()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "model"), [("linear_hifp8", "llama32-1b"), ("FA_linear_mxfp4", "deepseek2_lite")]
)
def test_own_formats_train_evaluate_and_are_captured_as_emulated_to_the_bit(
    te: Child,
    tiny_words: list[str],
    tiny_models: dict[str, list[str]],
    tmp_path: Path,
    emulated: Any,
    scheme: str,
    model: str,
) -> None:
    words = (
        *tiny_models[model],
        f"quant={scheme}",
        "evaluation.every=1",
        "evaluation.samples=2",
        "capture=tensors",
    )
    result = te.run(run, tmp_path / "te", tiny_words[-1], OWN, *words)
    assert result["reason"] is None
    assert result["precision"]["proved"]
    here = emulated(*words)
    assert result["losses"] == measured(here)
    theirs, ours = captured(RunDir(Path(result["root"]))), captured(here)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in ours)


@pytest.mark.parametrize(
    ("words", "scheme"),
    [
        (("quant=FA_linear_mxfp8", NATIVE), "FA_linear_mxfp8"),
        pytest.param(("quant=more/te_fp8_current",), "more/linear_fp8", marks=pytest.mark.slow),
        pytest.param(("quant=bf16", NATIVE), "bf16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_recipe_trains_and_evaluates_near_the_emulation_and_is_proved(
    te: Child,
    tiny_words: list[str],
    tmp_path: Path,
    emulated: Any,
    words: tuple[str, ...],
    scheme: str,
) -> None:
    """Operands are near-equal (current scaling: up to bf16's rounding, 2^-9 of each), sums are in another order.

    The first loss and gradient norm then differ by less than 1e-2, and the losses after a step of Adam, which makes
    steps of one size of gradients of any, by less than 2e-2. Weights that stayed those of the first iteration, in
    training or in the evaluation, move its loss from 4.8 to 6.0.
    """
    common = ("evaluation.every=1", "evaluation.samples=2", "capture=off", "training.lr=0.01")
    result = te.run(run, tmp_path / "te", tiny_words[-1], *words, *common)
    assert result["reason"] is None
    assert result["precision"]["proved"]
    here = measured(emulated(f"quant={scheme}", *common))
    assert result["losses"][0][:2] == pytest.approx(here[0][:2], rel=1e-2)
    for theirs, ours in zip(result["losses"], here, strict=True):
        assert theirs[::2] == pytest.approx(ours[::2], rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", ["te_mxfp8_hybrid", "te_fp8_delayed", "te_fp8_blockwise", "te_nvfp4"]
)
def test_the_other_shipped_recipes_train_and_are_proved(
    te: Child, tiny_words: list[str], tmp_path: Path, scheme: str
) -> None:
    result = te.run(run, tmp_path, tiny_words[-1], f"quant=more/{scheme}", "capture=off")
    assert result["reason"] is None
    assert result["precision"]["proved"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("quant=more/te_fp8_current",), ("quant=FA_linear_mxfp4", OWN)], ids=str
)
@pytest.mark.parametrize("model", ["deepseek2_lite", "qwen3"])
def test_other_families_train_and_are_proved(
    te: Child,
    tiny_words: list[str],
    tiny_models: dict[str, list[str]],
    tmp_path: Path,
    words: tuple[str, ...],
    model: str,
) -> None:
    """Latent attention, shared experts and routed ones, which stay in bf16; norms of heads."""
    rule = "quant.rules=[{modules: [expert*], format: bf16}]"
    rules = [rule] if model == "deepseek2_lite" else []
    result = te.run(
        run, tmp_path, tiny_words[-1], *tiny_models[model], *words, *rules, "capture=off"
    )
    assert result["reason"] is None
    assert result["precision"]["proved"]


@pytest.mark.slow
def test_rules_train_each_module_under_its_own_recipe_and_are_proved(
    te: Child, tiny_words: list[str], tmp_path: Path
) -> None:
    rules = (
        "quant.rules=[{layers: [0], operands: [g], iterations: [2, 2], format: mxfp8_e5m2}, "
        "{layers: [1], modules: [fc2], format: bf16}]"
    )
    words = ("quant=more/te_mxfp8", rules, "capture=off")
    result = te.run(run, tmp_path, tiny_words[-1], *words)
    assert result["reason"] is None
    assert result["precision"]["proved"]


def test_a_machine_that_cannot_run_a_recipe_ends_the_run_with_its_own_words(
    te: Child, tiny_words: list[str], tmp_path: Path
) -> None:
    words = ("quant=more/te_mxfp8", "capture=off")
    result = te.run(run, tmp_path, tiny_words[-1], *words, capability=H100)
    assert result["reason"] == (
        "Transformer Engine 2.11.0 cannot run MXFP8BlockScaling(E4M3) here: Device compute capability 10.0 or higher "
        "required for MXFP8 execution."
    )


def benchmarked(folder: Path, scheme: str) -> list[dict[str, Any]]:
    """The rows of a scheme in the benchmarks' part of Transformer Engine."""
    import sys

    sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
    import gpu_parts

    cases = dict(gpu_parts.transformer_engine(gpu_parts.Setting("cpu", folder)))
    return cases[scheme]()


@pytest.mark.parametrize("scheme", ["te_mxfp8", "te_nvfp4"])
def test_a_benchmark_of_a_recipe_that_the_machine_cannot_run_is_refused_before_the_run(
    tmp_path: Path, te: Child, scheme: str
) -> None:
    (row,) = te.run(benchmarked, tmp_path, scheme, capability=H100)
    assert "Device compute capability 10.0 or higher required" in row["refused"]
    assert list(tmp_path.iterdir()) == []
