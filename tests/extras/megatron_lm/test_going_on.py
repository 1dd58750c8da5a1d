"""Checkpoints of the unmodified script: its own goes on, one of quantexp's starts it, and each starts the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantexp.analysis.compare.side import read_side
from quantexp.capture.reader import open_capture
from quantexp.cli.export import export
from quantexp.config.compose import compose
from quantexp.extras.megatron_lm.checkpoint_reader import read_weights
from quantexp.extras.megatron_lm.checkpoint_writer import write_checkpoint
from quantexp.model.huggingface.weights import open_weights
from quantexp.runs.paths import RunDir
from quantexp.runs.status import read_status
from tests.conftest import run_here
from tests.extras.megatron_lm.checkout import run_script
from tests.extras.megatron_lm.runs import lines, proof, quantised
from tests.model.huggingface.runs import data_words, model_words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
#: Everything that repeats or interrupts forward passes.
_WORDS = [
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1", "--split", "90,10,0"),
    *("--eval-interval", "1", "--eval-iters", "2"),
]
_EXACT = ("iteration", "loss", "grad_norm", "lr", "tokens")


def _numbers(run: RunDir) -> list[Any]:
    return [[line[key] for key in _EXACT] for line in lines(run)]


@pytest.mark.parametrize(
    "layout",
    [["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]],
    ids=str,
)
def test_both_formats_of_a_layouts_checkpoint_have_the_same_weights(
    source: Path, layout: list[str], tmp_path: Path
) -> None:
    words = [*layout, "--train-iters", "1", "--save-interval", "1"]
    read = []
    for form in ("torch", "torch_dist"):
        folder = tmp_path / form
        save = ["--save", str(folder), "--ckpt-format", form]
        assert run_script(source, tmp_path, [*words, *save], 2).code == 0
        read.append(read_weights(folder / "iter_0000001"))
    ours, theirs = read
    assert len(ours.sources) == 21
    assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in ours.sources)


def test_a_run_goes_on_from_megatron_lms_checkpoint_to_the_last_bit(
    source: Path, tmp_path: Path
) -> None:
    """Under delayed scales, whose histories are the run folder's, with evaluation and recomputation."""
    scheme, capture = (
        "more/linear_fp8_delayed",
        {"QUANTEXP_CAPTURE": "capture=stats capture.every=1"},
    )
    whole, run = RunDir(tmp_path / "whole"), RunDir(tmp_path / "checkpoints" / "quantexp")
    quantised(whole, tmp_path / "a", source, scheme, _WORDS, **capture)
    save = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "2", *_WORDS]
    quantised(run, tmp_path / "b", source, scheme, [*save, "--exit-interval", "2"], **capture)
    status = read_status(run.status)
    assert status is not None
    assert status.reason == "Megatron-LM ended after iteration 2 of 3"
    load = ["--load", str(tmp_path / "checkpoints")]
    quantised(run, tmp_path / "c", source, scheme, [*save, *load], **capture)
    assert _numbers(run) == _numbers(whole)
    assert len(lines(run)) == 3
    assert [each["iteration"] for each in (proof(run), *proof(run)["earlier"])] == [3, 1]
    status = read_status(run.status)
    assert status is not None
    assert (status.iteration, status.goes_on_from, len(status.restarts)) == (3, 2, 1)
    assert read_side(run).identity is not None


def test_passes_that_are_repeated_are_captured_once_and_change_no_history(
    source: Path, tmp_path: Path
) -> None:
    scheme = "more/linear_fp8_delayed"
    capture = {"QUANTEXP_CAPTURE": "capture=tensors capture.every=1"}
    once, twice = RunDir(tmp_path / "once"), RunDir(tmp_path / "twice")
    quantised(once, tmp_path, source, scheme, [], **capture)
    plant = str(Path(__file__).with_name("plants_twice.py"))
    ended = quantised(twice, tmp_path, source, scheme, [], QUANTEXP_TEST_PLANT=plant, **capture)
    assert ended.output.count("the passes are repeated") == 3
    assert _numbers(twice) == _numbers(once)
    assert len(open_capture(twice.root)) == len(open_capture(once.root)) > 0
    calls = [[entry["calls"] for entry in proof(run)["entries"]] for run in (once, twice)]
    assert calls[0] == calls[1]


def test_weights_go_from_megatron_lm_to_quantexps_form_and_back(
    source: Path, tmp_path: Path
) -> None:
    """Both formats have the same weights, and the script starts from the written form as from its own."""
    first = []
    for form in ("torch", "torch_dist"):
        folder = tmp_path / form
        words = ["--ckpt-format", form, "--save", str(folder), "--save-interval", "1"]
        run_script(source, folder, [*words, "--train-iters", "1"])
        out = export([str(folder), "format=hf", f"out={tmp_path / f'{form}_hf'}"], tmp_path)
        first.append(load_file(out / "model.safetensors"))
    assert first[0].keys() == first[1].keys()
    assert all(torch.equal(first[0][name], first[1][name]) for name in first[0])
    published = open_weights(tmp_path / "torch_dist_hf")
    model = read_weights(tmp_path / "torch_dist" / "iter_0000001").model
    write_checkpoint(model, published, None, tmp_path / "written", 1)
    curves = [
        run_script(source, tmp_path / "from", ["--finetune", "--load", str(tmp_path / name)]).curve
        for name in ("torch_dist", "written")
    ]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 3


def test_quantexp_trains_from_a_checkpoint_of_the_script(source: Path, tmp_path: Path) -> None:
    """From the published form, proved, with the script's weights in the first products."""
    saved, weights = tmp_path / "saved", tmp_path / "hf"
    words = ["--ckpt-format", "torch_dist", "--save", str(saved), "--save-interval", "2"]
    run_script(source, saved, [*words, "--train-iters", "2"])
    export([str(saved), "format=hf", f"out={weights}"], tmp_path)
    experiment = compose(
        [
            *model_words(weights),
            *data_words(tmp_path),
            *("quant=FA_linear_mxfp8", "training.iterations=2", "training.warmup_iterations=1"),
            *("training.micro_batch_size=1", "training.global_batch_size=1", "capture=tensors"),
            *("capture.iterations=[1]", "analysis.auto=false", f"paths.root={tmp_path / 'runs'}"),
            f"paths.cache={tmp_path / 'cache'}",
        ]
    )
    run = run_here(experiment)
    assert proof(run)["proved"]
    published = load_file(weights / "model.safetensors")
    captured = {
        each.metadata["layer"]: each.torch()
        for each in open_capture(run.root).with_values()
        if (each.metadata["module"], each.metadata["tensor"]) == ("fc2", "weight")
    }
    assert len(captured) == experiment.model.num_layers
    for layer, weight in captured.items():
        assert torch.equal(weight, published[f"model.layers.{layer}.mlp.down_proj.weight"])
