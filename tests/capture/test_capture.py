"""Captures of real runs, against the contract: names, manifest, content, price."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from quantexp.capture.record.recorder import Recorder
from quantexp.capture.select.budget import price
from quantexp.capture.select.choice import expected_tensors
from quantexp.capture.store.manifest import ManifestLine
from quantexp.capture.store.metadata import About
from quantexp.errors import CaptureError
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import Experiment
from quantexp.training.megatron.cpu import _CudaMeansCpu

Tiny = Callable[..., Experiment]
RunTiny = Callable[..., RunDir]

NAME = re.compile(
    r"\d{8}_\d{6}_\d{4,}_(attention|linear)_L\d+(-[a-z0-9]+)?_(forward|backward)_(pre|post)_"
    r"(FA|linear)_(bf16|mxfp8|mxfp4|hifp8)_[a-z_]+\.pt"
)
MANIFEST_KEYS = {
    "file",
    "module",
    "layer",
    "layer_type",
    "operation",
    "phase",
    "component",
    "quant_type",
    "tensor",
    "iteration",
    "micro_batch",
    "rank",
    "shape",
    "dtype",
    "bytes",
    "hash",
    "formats",
}
METADATA_KEYS = {
    "quant_type",
    "phase",
    "component",
    "operation",
    "layer",
    "rank",
    "iteration",
    "shape",
    "dtype",
    "statistics",
}


def manifest(run: RunDir, name: str = "manifest.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.tensors / name).read_text().splitlines()]


def loaded(run: RunDir, line: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(run.tensors / line["file"], weights_only=True)
    return content


def kinds(lines: list[dict[str, Any]]) -> Counter[tuple[str, ...]]:
    keys = ("module", "operation", "phase", "tensor")
    return Counter(tuple(str(line[k]) for k in keys) for line in lines)


@pytest.fixture(scope="module")
def quantised(run_tiny_once: RunTiny) -> RunDir:
    """A run of FA_linear_mxfp8 and all it captures by default."""
    return run_tiny_once("quant=FA_linear_mxfp8")


def test_every_file_is_named_listed_and_whole(quantised: RunDir) -> None:
    run = quantised
    lines = manifest(run)
    files = {str(p.relative_to(run.tensors)) for p in run.tensors.rglob("*.pt")}
    assert files
    assert files == {line["file"] for line in lines}
    assert not list(run.tensors.rglob("*.part"))
    for line in lines:
        assert line.keys() >= MANIFEST_KEYS
        assert line.keys() <= ManifestLine.__annotations__.keys()
        folder, name = line["file"].split("/")
        assert folder == line["quant_type"]
        assert NAME.fullmatch(name), name
        content = loaded(run, line)
        assert content.keys() == {"tensor", "metadata"}
        assert content["metadata"].keys() >= METADATA_KEYS
        tensor = content["tensor"]
        assert list(tensor.shape) == line["shape"]
        assert str(tensor.dtype) == f"torch.{line['dtype']}"
        assert tensor.numel() * tensor.element_size() == line["bytes"]
        raw = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        assert "xxh3_128:" + xxhash.xxh3_128_hexdigest(raw) == line["hash"]


def test_every_tensor_of_the_contract_is_there_once(run_tiny: RunTiny, tiny: Tiny) -> None:
    words = [f"capture.{key}=true" for key in ("attn_weights", "weight_grads", "residual")]
    run = run_tiny("quant=FA_linear_mxfp8", *words)
    expected = list(expected_tensors(tiny(*words)))
    lines = manifest(run)
    assert kinds(lines) == Counter(
        (t.module.name, t.operation, t.phase, t.tensor) for t in expected
    )
    shapes = {(t.module.layer, t.module.name, t.operation, t.tensor): t.shape for t in expected}
    for line in lines:
        key = (line["layer"], line["module"], line["operation"], line["tensor"])
        assert tuple(line["shape"]) == shapes[key], key
    names = {line["tensor"] for line in lines}
    assert names == {
        "query",
        "key",
        "value",
        "output",
        "attn_weights",
        "grad_output",
        "grad_query",
        "grad_key",
        "grad_value",
        "grad_attn_weights",
        "grad_scores",
        "input",
        "weight",
        "grad_input",
        "grad_weight",
        "main_grad",
        "resid_pre",
        "resid_mid",
        "resid_post",
        "grad_resid_pre",
        "grad_resid_mid",
        "grad_resid_post",
    }


def test_qkv_proj_fc1_and_fc2_are_distinguished(quantised: RunDir) -> None:
    lines = [m for m in manifest(quantised) if m["layer_type"] == "linear"]
    assert {m["module"] for m in lines} == {"qkv", "proj", "fc1", "fc2"}
    assert {m["file"].split("_")[4] for m in lines} == {
        f"L{layer}-{module}" for layer in (0, 1) for module in ("qkv", "proj", "fc1", "fc2")
    }


@pytest.mark.parametrize(
    ("overrides", "linear", "attention"),
    [
        (["quant=FA_mxfp8"], "bf16", "mxfp8"),
        (["quant=linear_mxfp4"], "mxfp4", "bf16"),
        (["quant=bf16", "quant/pv=mxfp4"], "bf16", "mxfp4"),
    ],
)
def test_the_folder_is_the_format_of_the_site(
    run_tiny: RunTiny, overrides: list[str], linear: str, attention: str
) -> None:
    run = run_tiny(*overrides, "training.iterations=1", "training.warmup_iterations=0")
    assert quant_types(run) == {("linear", linear), ("attention", attention)}


def test_the_folder_is_that_of_each_site_where_both_have_a_format(quantised: RunDir) -> None:
    assert quant_types(quantised) == {("linear", "mxfp8"), ("attention", "mxfp8")}


def quant_types(run: RunDir) -> set[tuple[str, str]]:
    return {(m["layer_type"], m["quant_type"]) for m in manifest(run)}


def test_a_weight_is_stored_once_and_both_phases_refer_to_it(run_tiny: RunTiny) -> None:
    run = run_tiny("training.global_batch_size=4", "capture.collect_micro_batches=0")
    weights = [m for m in manifest(run) if m["tensor"] == "weight"]
    by_file = Counter(m["file"] for m in weights)
    assert len(by_file) == 2 * 4
    assert set(by_file.values()) == {2}
    assert {(m["operation"], m["phase"]) for m in weights} == {
        ("forward", "pre"),
        ("backward", "pre"),
    }


def test_each_micro_batch_is_captured_once_with_its_number(run_tiny: RunTiny) -> None:
    run = run_tiny("training.global_batch_size=6", "capture.collect_micro_batches=2")
    inputs = [m for m in manifest(run) if m["tensor"] in ("input", "grad_input", "query")]
    assert Counter(m["micro_batch"] for m in inputs) == {0: len(inputs) // 2, 1: len(inputs) // 2}


def test_no_mode_intercepts_torchs_functions_while_a_tensor_is_recorded(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_keeping, calls = [False], Counter[bool]()
    keep, answer = Recorder.keep, _CudaMeansCpu.__torch_function__

    def marked_keep(*args: Any) -> About:
        is_keeping[0] = True
        about = keep(*args)
        is_keeping[0] = False
        return about

    def counted_answer(*args: Any) -> Any:
        calls[is_keeping[0]] += 1
        return answer(*args)

    monkeypatch.setattr(Recorder, "keep", marked_keep)
    monkeypatch.setattr(_CudaMeansCpu, "__torch_function__", counted_answer)
    assert manifest(run_tiny())
    assert calls[False] > 0
    assert calls[True] == 0


@pytest.mark.slow
def test_a_recomputed_forward_is_not_captured_again(quantised: RunDir, run_tiny: RunTiny) -> None:
    plain = manifest(quantised)
    recomputed = manifest(run_tiny("quant=FA_linear_mxfp8", "training.recompute=full"))
    assert kinds(plain) == kinds(recomputed)
    hashes = [
        {(m["module"], m["layer"], m["operation"], m["tensor"]): m["hash"] for m in c}
        for c in (plain, recomputed)
    ]
    assert hashes[0] == hashes[1]


def test_the_iterations_of_the_schedule_are_captured(run_tiny: RunTiny) -> None:
    """`test_rules_schedule` tests which keys give which schedule."""
    run = run_tiny("training.iterations=3", "capture.iterations=[1,3]")
    assert {m["iteration"] for m in manifest(run)} == {1, 3}


def test_stop_after_capture_ends_the_run_as_completed_with_everything_on_disk(
    run_tiny: RunTiny,
) -> None:
    run = run_tiny("training.iterations=50", "capture.stop_after_capture=true")
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.iteration) == (State.COMPLETED, 1)
    assert status.reason == "stopped after capture, as configured"
    assert "grad_input" in {m["tensor"] for m in manifest(run)}


@pytest.mark.slow
def test_the_price_is_exact(run_tiny: RunTiny, tiny: Tiny) -> None:
    overrides = [
        "training.iterations=3",
        "training.global_batch_size=6",
        "capture.control_iter=2",
        "capture.collect_micro_batches=2",
        "capture.weight_grads=true",
        "capture.attn_weights=true",
        "capture.residual=true",
    ]
    lines = manifest(run_tiny(*overrides))
    stored = {m["file"]: m["bytes"] for m in lines}
    assert sum(stored.values()) == price(tiny(*overrides)).num_bytes


def test_statistics_alone_store_no_tensor_and_agree_with_the_values(
    quantised: RunDir, run_tiny: RunTiny
) -> None:
    stats = run_tiny("quant=FA_linear_mxfp8", "capture=stats")
    assert not list(stats.tensors.rglob("*.pt"))
    assert not (stats.tensors / "manifest.jsonl").exists()
    values = {m["file"]: m for m in manifest(quantised)}
    assert values
    for line in values.values():
        x = loaded(quantised, line)["tensor"].double()
        s = line["statistics"]
        assert s["count"] == x.numel()
        assert s["zeros"] == int((x == 0).sum())
        assert s["mean"] == pytest.approx(x.mean().item(), rel=1e-9, abs=1e-15)
        assert s["std"] == pytest.approx(x.std(correction=0).item(), rel=1e-6)
        assert (s["min"], s["max"]) == (x.min().item(), x.max().item())
        assert s["abs_max"] == x.abs().max().item()
    without_file = [
        (m["module"], m["tensor"], m["statistics"]) for m in manifest(stats, "statistics.jsonl")
    ]
    with_file = [
        (m["module"], m["tensor"], m["statistics"]) for m in manifest(quantised, "statistics.jsonl")
    ]
    assert without_file == with_file


def test_the_report_counts_the_files_by_site_layer_and_operation(quantised: RunDir) -> None:
    run = quantised
    report = json.loads((run.tensors / "report.json").read_text())
    files = {m["file"]: m for m in reversed(manifest(run))}  # a weight counts as the forward's
    assert report["files"] == len(files)
    assert report["bytes"] == sum(m["bytes"] for m in files.values())
    for key in ("layer_type", "layer", "operation"):
        counted = Counter(str(m[key]) for m in files.values())
        assert {name: each["files"] for name, each in report[f"by_{key}"].items()} == counted


def test_fp16_gradients_carry_their_loss_scale(run_tiny: RunTiny) -> None:
    run = run_tiny("training.precision=fp16", "training.initial_loss_scale=256")
    lines = manifest(run)
    assert {m["dtype"] for m in lines} == {"float16"}
    assert {m["loss_scale"] for m in lines} == {256.0}


def test_the_capture_goes_to_capture_dir_below_the_runs_own_name(
    run_tiny: RunTiny, tmp_path: Path
) -> None:
    run = run_tiny(f"capture.dir={tmp_path / 'elsewhere'}")
    assert not run.tensors.exists()
    assert (tmp_path / "elsewhere" / run.root.name / "manifest.jsonl").is_file()


def test_a_full_disk_ends_the_run_with_one_line_and_no_half_file(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, files = torch.save, list[Path]()

    def full_after_ten(content: Any, file: Path) -> None:
        real(content, file)
        files.append(file)
        if len(files) == 11:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_after_ten)
    run = run_tiny(expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert status.reason.startswith("captured tensors cannot be written to ")
    assert "No space left on device; free some space, set capture.dir" in status.reason
    assert len(manifest(run)) == 10
    assert not list(run.tensors.rglob("*.part"))


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(
    run_tiny: RunTiny, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CaptureError, match="captured tensors cannot be written to"):
        run_tiny(f"capture.dir={tmp_path / 'file'}")


def test_torchs_message_for_a_full_disk_is_translated(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(content: Any, file: Path) -> None:
        file.write_bytes(b"half")
        raise RuntimeError(
            "[enforce fail at inline_container.cc:672] . unexpected pos 1984 vs 1814"
        )

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr("quantexp.capture.store.folder._free_bytes", lambda path: 0)
    run = run_tiny(expect=1)
    status = read_status(run.status)
    assert status is not None
    assert "No space left on device; free some space" in status.reason
    assert not list(run.tensors.rglob("*.part"))
