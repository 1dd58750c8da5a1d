"""Limits of a capture's size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.capture.select.budget import (
    price,
    rank_bytes_of_iteration,
    require_affordable,
    require_affordable_together,
)
from quantexp.capture.select.choice import expected_alike, expected_tensors
from quantexp.errors import CaptureError
from quantexp.model.layout import Layout
from quantexp.quant.precision import ModuleId, precision_map
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import Experiment, ParallelConfig
from tests.capture.layouts import of_dense, record

Tiny = Callable[..., Experiment]


def test_a_capture_over_its_budget_is_refused_before_it_starts(tiny: Tiny, tmp_path: Path) -> None:
    from quantexp.launch.attempt import open_run

    experiment = tiny("capture.max_gb=0.001")
    words = (
        r"the capture would take 0.00\d+ GB in \d+ tensors, and capture.max_gb allows 0.001; cap"
    )
    with pytest.raises(CaptureError, match=words), open_run(experiment, "cpu", ["test"]):
        pass
    assert not list(tmp_path.glob("runs/*/config.yaml"))


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_capture_into_a_file_is_refused_and_leaves_no_run_folder(
    tiny: Tiny, tmp_path: Path, folder: str
) -> None:
    from quantexp.launch.attempt import open_run

    (tmp_path / "file").touch()
    experiment = tiny(f"capture.dir={tmp_path / folder}")
    words = (
        f"captured tensors cannot be written to capture.dir={tmp_path / folder}: {tmp_path / 'file'}: Not a "
        "directory; give another folder"
    )
    with pytest.raises(CaptureError) as refused, open_run(experiment, "cpu", ["test"]):
        pass
    assert str(refused.value) == words
    assert not list(tmp_path.glob("runs/tiny*"))


def test_a_capture_into_a_folder_without_permission_is_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda folder, mode: False)
    with pytest.raises(CaptureError, match=rf"{tmp_path}: Permission denied; give another folder"):
        require_affordable(tiny(f"capture.dir={tmp_path / 'new'}"), tmp_path)


def test_a_capture_over_the_free_disk_is_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1_000_000

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    words = (
        rf"GB with its lists, and {tmp_path} has 0.001 GB free; .* or set capture.dir to another"
    )
    with pytest.raises(CaptureError, match=words):
        require_affordable(tiny(), tmp_path / "not" / "there")
    require_affordable(tiny("capture=off"), tmp_path)


def test_runs_whose_captures_together_are_over_the_free_disk_are_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny()
    each = price(experiment).on_disk

    class Usage:
        free = 2 * each

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    runs = [(experiment, tmp_path / str(i)) for i in range(3)]
    require_affordable_together(runs[:2])
    with pytest.raises(
        CaptureError, match=r"the captures of 3 runs would take .* GB with their lists"
    ):
        require_affordable_together(runs)
    require_affordable_together([(tiny("capture=off"), tmp_path)] * 9)


def test_statistics_alone_have_a_price_too(tiny: Tiny) -> None:
    cost = price(tiny("capture=stats"))
    assert (cost.tensors, cost.num_bytes) == (0, 0)
    assert cost.statistics == price(tiny()).tensors > 0
    assert price(tiny("capture=off")).on_disk == 0


def test_the_budget_limits_a_running_capture_and_the_manifest_lists_omitted_tensors(
    run_tiny: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantexp.launch.attempt.require_affordable", lambda *_: None)
    run = run_tiny("capture.max_gb=0.0001")
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (run.tensors / "manifest.jsonl").read_text().splitlines()
    ]
    stored = {line["file"]: line["bytes"] for line in lines if line["file"]}
    assert 0 < sum(stored.values()) <= 100_000
    left_out = [line for line in lines if line["file"] is None]
    assert {line["left_out"] for line in left_out} == {"over capture.max_gb=0.0001"}
    assert all(line["statistics"]["count"] for line in left_out)


def test_a_full_disk_ends_the_capture_and_training_continues_on_request(
    run_tiny: Callable[..., RunDir],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(content: Any, file: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    run = run_tiny("capture.train_on_if_full=true")
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.iteration) == (State.COMPLETED, 2)
    words = (
        "capture stopped in iteration 1, training continues: captured tensors cannot be written to"
    )
    assert status.capture["stopped"].startswith(words)
    assert capsys.readouterr().err.count(words) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["quant=bf16", "capture=stats"],
        [
            "quant=FA_linear_mxfp8",
            "capture.residual=true",
            "capture.rules=[{layers:[-1],level:off}]",
        ],
        ["quant=linear_mxfp4", "capture.values=both", "quant.linear.rounding=stochastic"],
        [
            *("quant=FA_linear_mxfp8", "capture.values=after", "capture.sample_count=3"),
            "quant.rules=[{layers:[0],modules:['*fc1'],block:16}]",
            "capture.rules=[{modules:[fc2],level:stats},{tensors:[main_grad],level:tensors}]",
        ],
    ],
    ids=["plain", "layers", "streams", "rules"],
)
@pytest.mark.parametrize("model", ["llama32-1b", "deepseek2_lite"])
def test_modules_that_are_counted_together_give_the_same_count(
    tiny: Tiny, tiny_models: dict[str, list[str]], model: str, words: list[str]
) -> None:
    """The tokens do not divide evenly: some routed experts have one more than others."""
    experiment = tiny(*tiny_models[model], "training.seq_length=33", *words)
    declared = precision_map(experiment.model, experiment.quant)
    nowhere = ModuleId(0, "")
    counted: Counter[Any] = Counter()
    for count, tensors in expected_alike(experiment, declared):
        for tensor in tensors:
            counted[replace(tensor, module=nowhere)] += count
    one_by_one = (replace(tensor, module=nowhere) for tensor in expected_tensors(experiment))
    assert counted == Counter(one_by_one)


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2},
        {"tensor": 2, "sequence": False},
        {"pipeline": 2},
        {"context": 2},
        {"tensor": 2, "context": 2},
        {"tensor": 2, "pipeline": 2},
    ],
    ids=["TP2+SP", "TP2", "PP2", "CP2", "TP2xCP2", "TP2xPP2"],
)
@pytest.mark.parametrize("data", [1, 2])
def test_the_price_is_what_all_ranks_of_a_layout_store(
    tiny: Tiny, tmp_path: Path, parallel: dict[str, Any], data: int
) -> None:
    sizes = (parallel.get(key, 1) for key in ("tensor", "pipeline", "context"))
    keys = ("attn_weights", "weight_grads", "residual")
    words = ["training.global_batch_size=8", *(f"capture.{key}=true" for key in keys)]
    experiment = tiny("quant=bf16", "training.micro_batch_size=2", *words)
    launcher = replace(experiment.launcher, num_processes=data * prod(sizes))
    experiment = replace(experiment, launcher=launcher, parallel=ParallelConfig(**parallel))
    layout = Layout.of(experiment)
    whole = {
        (e.module.layer, e.module.name, e.tensor): torch.zeros(e.shape, dtype=DTYPES[e.bytes_each])
        for e in expected_tensors(experiment)
    }
    record(tmp_path, layout, of_dense(whole, layout), capture=experiment.capture)
    lines = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    stored = {line["key"]: line["bytes"] for line in lines}
    of_first = sum({line["key"]: line["bytes"] for line in lines if line["rank"] == 0}.values())
    statistics = (tmp_path / "statistics.jsonl").read_text().splitlines()
    cost = price(experiment)
    assert (cost.tensors, cost.num_bytes) == (len(stored), sum(stored.values()))
    assert cost.statistics == len(statistics)
    declared = precision_map(experiment.model, experiment.quant)
    # The embedding's output is on the first stage alone, and is counted as spread over both.
    embedding = (layout.pipeline - 1) * sum(
        line["bytes"] for line in lines if line["rank"] == 0 and "resid_pre" in line["tensor"]
    )
    expected = of_first - embedding / 2
    assert rank_bytes_of_iteration(experiment, declared) == pytest.approx(expected, abs=0.5)


#: By the bytes of an element.
DTYPES = {2: torch.bfloat16, 4: torch.float32}
