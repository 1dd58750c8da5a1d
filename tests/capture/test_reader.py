"""Captured tensors read again and exported."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import safetensors.torch
import torch

from quantexp.capture import open_capture
from quantexp.cli.main import main
from quantexp.errors import CaptureError

from .listed import statistics_line, value


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        ({"layer": 0}, [0, 1, 1]),
        ({"tensor": "*put"}, [0, 3, None]),
        ({"module": ["attention", "none"]}, [2]),
        ({"iteration": lambda i: i is not None and i > 2}, [2, 3]),
        ({"iteration": range(2, 4), "layer": 1}, [2]),
        ({"layer": 7}, []),
    ],
)
def test_any_metadata_selects(
    folder: Path, wanted: dict[str, Any], files: list[int | None]
) -> None:
    selected = [entry.metadata["file"] for entry in open_capture(folder).select(**wanted)]
    assert selected == [None if i is None else f"mxfp8/{i}.pt" for i in files]


def test_values_come_as_torch_and_numpy_and_a_weight_counts_once(folder: Path) -> None:
    capture = open_capture(folder.parent)  # the run's folder will do
    assert len(capture) == 6
    files = capture.with_values()
    assert (len(files), files.num_bytes) == (4, 4 * 12)
    for i, entry in enumerate(files):
        assert torch.equal(entry.torch(), value(i))
        assert entry.numpy().dtype == np.float32
        np.testing.assert_array_equal(entry.numpy(), value(i).float().numpy())
        assert entry.is_intact()


def test_a_tensor_that_was_left_out_has_a_reason(folder: Path) -> None:
    (entry,) = open_capture(folder).select(left_out="*")
    with pytest.raises(CaptureError, match=r"L1 input of .* has no values: over capture.max_gb=1"):
        entry.torch()


def test_the_manifest_is_rows_and_a_dataframe(folder: Path) -> None:
    capture = open_capture(folder)
    assert capture.rows()[0]["module"] == "fc1"
    frame = capture.dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["layer"].tolist() == [0, 0, 0, 1, 1, 1]


def test_a_dataframe_without_pandas_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(
        CaptureError, match=r"a DataFrame needs pandas: install it, or use rows\(\)"
    ):
        open_capture(folder).dataframe()


def test_an_unknown_key_is_refused_with_the_available_ones(folder: Path) -> None:
    with pytest.raises(CaptureError, match="lajer must be a key of the metadata, one of bytes, fi"):
        open_capture(folder).select(lajer=0)


def test_a_torn_line_is_left_out_and_parts_of_ranks_are_read(folder: Path) -> None:
    (folder / "manifest.rank1.jsonl").write_text('{"file": "x.pt", "rank": 1}\n{"file": "y')
    assert len(open_capture(folder)) == 7


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        (
            "20250908_095220_0001_attention_L3_forward_pre_FA_mxfp8_query.pt",
            {"layer": 3, "module": "attention", "phase": "pre", "tensor": "query"},
        ),
        (
            "20250908_095220_0012_linear_L0-fc1_backward_post_linear_hifp8_grad_input.pt",
            {"layer": 0, "module": "fc1", "operation": "backward", "tensor": "grad_input"},
        ),
        (
            "20250908_095220_0007_linear_forward_mxfp4_grad_output.pt",
            {"layer": None, "module": None, "quant_type": "mxfp4", "tensor": "grad_output"},
        ),
        (
            "20250908_092156_0001_attention_L0_forward_hifp8_query.pt",
            {"layer": 0, "module": "attention", "phase": None, "quant_type": "hifp8"},
        ),
        (
            "20250908_092156_0002_linear_L1_backward_hifp8_grad_input.pt",
            {"layer": 1, "module": None, "operation": "backward", "tensor": "grad_input"},
        ),
        (
            "20260908_092156_0003_residual_L1_forward_pre_residual_bf16_resid_pre.pt",
            {"layer": 1, "module": "residual", "phase": "pre", "tensor": "resid_pre"},
        ),
        (
            "20260908_092156_0004_router_L2_forward_post_router_bf16_router_logits.pt",
            {"layer": 2, "module": "router", "component": "router", "tensor": "router_logits"},
        ),
        (
            "20260908_092156_0005_norm_L0-mlp-norm_forward_post_norm_mxfp8_output.pt",
            {"layer": 0, "module": "mlp-norm", "layer_type": "norm", "quant_type": "mxfp8"},
        ),
    ],
)
def test_old_collections_without_a_manifest_open(
    tmp_path: Path, name: str, metadata: dict[str, Any]
) -> None:
    (tmp_path / "mxfp8").mkdir()
    torch.save({"tensor": value(1), "metadata": {}}, tmp_path / "mxfp8" / name)
    (tmp_path / "unrelated.pt").write_text("of another program")
    (entry,) = open_capture(tmp_path)
    assert entry.metadata.items() >= metadata.items()
    assert torch.equal(entry.torch(), value(1))
    assert entry.is_intact() is None


def test_a_name_with_a_phase_and_no_component_is_no_captured_tensor(tmp_path: Path) -> None:
    (tmp_path / "20250908_092156_0001_attention_L0_forward_pre_query.pt").touch()
    with pytest.raises(CaptureError, match="holds no captured tensors"):
        open_capture(tmp_path)


def test_an_old_collection_of_mixed_names_is_selected_by_what_each_name_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (
        "20250908_092156_0001_attention_L0_forward_hifp8_query",
        "20250908_092156_0002_linear_forward_hifp8_weight",
        "20250908_095220_0003_attention_L0_forward_pre_FA_mxfp8_query",
    ):
        torch.save({"tensor": value(1), "metadata": {}}, tmp_path / f"{name}.pt")
    old = open_capture(tmp_path)
    assert [len(old.select(layer=0)), len(old.select(phase="pre"))] == [2, 1]
    assert main(["captures", str(tmp_path), "--list", "tensor=query"]) == 0
    table = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert table == [
        "all: layer 0, module attention, operation forward, tensor query",
        "phase",
        "",
        "pre",
    ]


def test_a_folder_without_captures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"holds no captured tensors: neither a manifest.jsonl"):
        open_capture(tmp_path)
    with pytest.raises(
        CaptureError, match=r"there is no folder .*; give the tensors folder of a run"
    ):
        open_capture(tmp_path / "none")


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.target,)


def test_nothing_in_a_capture_folder_runs_code(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    torch.save({"tensor": value(0), "metadata": Malicious(ran)}, folder / "mxfp8/0.pt")
    (folder / "mxfp8/1.pt").write_bytes(pickle.dumps(Malicious(ran)))
    capture = open_capture(folder).with_values()
    for index in (0, 1):
        with pytest.raises(CaptureError, match=r"\d.pt is refused: .* holds more than tensors and"):
            capture[index].torch()
    assert main(["captures", str(folder), "--check"]) == 1
    assert not ran.exists()
    torch.load(folder / "mxfp8/0.pt", weights_only=False)  # it would have
    assert ran.exists()


def test_a_manifest_cannot_name_a_file_elsewhere(folder: Path) -> None:
    (folder / "manifest.jsonl").write_text('{"file": "../../secret.pt"}\n')
    with pytest.raises(CaptureError, match=r"names ../../secret.pt, which is outside the folder"):
        open_capture(folder)[0].torch()


def test_exports_contain_the_values_and_their_metadata(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("pt", "safetensors", "npz"):
        out = tmp_path / kind
        words = ["captures", str(folder), "module=fc1", "--export", str(out), "--to", kind]
        assert main(words) == 0
        assert f"3 files in {out}" in capsys.readouterr().out
        assert len(list(out.rglob("*.*"))) == 3
        assert main(words) == 1
        assert "is there already; export to an empty folder" in capsys.readouterr().err
    assert torch.equal(
        torch.load(tmp_path / "pt/mxfp8/3.pt", weights_only=True)["tensor"], value(3)
    )
    file = tmp_path / "safetensors/mxfp8/3.safetensors"
    assert torch.equal(safetensors.torch.load_file(file)["tensor"], value(3))
    with safetensors.safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["metadata"])["tensor"] == "output"
    with np.load(tmp_path / "npz/mxfp8/3.npz") as arrays:
        np.testing.assert_array_equal(arrays["tensor"], value(3).float().numpy())
        assert json.loads(str(arrays["metadata"]))["layer"] == 1


def test_statistics_alone_can_be_opened_too(folder: Path) -> None:
    listed, more = statistics_line(), statistics_line(tensor="grad_output")
    (folder / "statistics.jsonl").write_text(listed + more)
    (folder / "statistics.rank1.jsonl").write_text(statistics_line(rank=1))
    plain = open_capture(folder)
    capture = open_capture(folder, statistics=True)
    assert list(capture)[: len(plain)] == list(plain)
    added = list(capture)[len(plain) :]
    assert [(e.metadata["tensor"], e.metadata.get("rank")) for e in added] == [
        ("grad_output", None),
        ("input", 1),
    ]
    assert capture.described() == added
    assert len(capture.with_values()) == len(plain.with_values())


def test_a_folder_of_statistics_alone_can_be_opened_on_request(
    tmp_path: Path,
) -> None:
    (tmp_path / "statistics.jsonl").write_text(statistics_line())
    (entry,) = open_capture(tmp_path, statistics=True)
    with pytest.raises(CaptureError, match="has no values: only statistics were kept"):
        entry.torch()
    message = r"holds no captured tensors: statistics alone were kept; run with capture=tensors"
    with pytest.raises(CaptureError, match=message):
        open_capture(tmp_path)
