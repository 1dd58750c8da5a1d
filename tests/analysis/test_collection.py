from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantexp.analysis.collection import (
    load_tensor,
    read_collection,
    read_manifest,
    unique_files,
)
from quantexp.capture.about import About
from quantexp.capture.store import CaptureStore
from quantexp.errors import CaptureError
from quantexp.schema import StoreKind

from .captures import MX8, Capture, linear_formats


def test_a_record_has_what_its_line_says(capture: Capture) -> None:
    line = capture.add(torch.ones(4, 8), "input", "fc1", 3, formats=linear_formats(MX8))
    (record,) = read_manifest(capture.dir)
    assert record.file == line["file"]
    assert record.shape == (4, 8)
    assert (record.module, record.layer, record.operation) == ("fc1", 3, "forward")
    assert record.formats["wgrad.x"]["axis"] == "tokens"
    assert record.label == "fc1 L3 forward input"


def test_records_keep_the_order_of_the_manifest(capture: Capture) -> None:
    for name in ("output", "input", "grad_output"):
        capture.add(torch.ones(2), name)
    assert [r.tensor for r in read_manifest(capture.dir)] == ["output", "input", "grad_output"]


def test_a_tensor_comes_back_bit_for_bit(capture: Capture) -> None:
    x = torch.randn(5, 7).to(torch.bfloat16)
    capture.add(x, "input")
    (record,) = read_manifest(capture.dir)
    assert torch.equal(load_tensor(capture.dir, record), x)


def test_torchs_old_file_layout_is_read(capture: Capture) -> None:
    line = capture.add(torch.ones(3), "input")
    payload = {"tensor": torch.arange(3.0), "metadata": {}}
    torch.save(payload, capture.dir / line["file"], _use_new_zipfile_serialization=False)
    (record,) = read_manifest(capture.dir)
    assert load_tensor(capture.dir, record).tolist() == [0, 1, 2]


def test_a_shared_weight_is_one_file(capture: Capture) -> None:
    w = torch.ones(4, 4)
    line = capture.add(w, "weight")
    capture.add(w, "weight", file=line["file"])
    records = read_manifest(capture.dir)
    assert [r.operation for r in records] == ["forward", "backward"]
    assert unique_files(records) == records[:1]


def test_a_torn_last_line_is_counted_and_the_rest_read(capture: Capture) -> None:
    capture.add(torch.ones(2), "input")
    capture.write(tail='{"file": "mxfp8/2025')
    collection = read_collection(capture.dir)
    assert len(collection.records) == 1
    assert collection.torn_lines == (2,)


def test_an_untorn_manifest_has_no_torn_lines(capture: Capture) -> None:
    capture.add(torch.ones(2), "input")
    assert read_collection(capture.dir).torn_lines == ()


def test_a_missing_file_is_named_and_its_record_kept(capture: Capture) -> None:
    gone = capture.add(torch.ones(2), "input")["file"]
    capture.add(torch.ones(2), "output")
    (capture.dir / gone).unlink()
    collection = read_collection(capture.dir)
    assert collection.missing == (gone,)
    assert len(collection.records) == 2


def test_fields_of_later_versions_are_ignored(capture: Capture) -> None:
    capture.add(torch.ones(2), "input")["colour"] = "blue"
    capture.write()
    assert len(read_manifest(capture.dir)) == 1


def test_no_folder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"no such folder; expected manifest.jsonl") as caught:
        read_manifest(tmp_path / "nowhere")
    assert "run with capture=tensors" in str(caught.value)


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"holds no captured tensors: there is no manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "\n", '{"file": '])
def test_a_manifest_without_a_complete_line_is_refused(capture: Capture, text: str) -> None:
    capture.write(tail=text)
    with pytest.raises(CaptureError, match=r"manifest.jsonl has no complete line"):
        read_manifest(capture.dir)


def test_a_line_that_lacks_fields_is_refused_by_their_names(capture: Capture) -> None:
    line = capture.add(torch.ones(2), "input")
    del line["rank"], line["bytes"]
    capture.write()
    with pytest.raises(CaptureError, match=r"manifest.jsonl:1 lacks rank, bytes; every line must"):
        read_manifest(capture.dir)


def test_loading_a_missing_file_names_it(capture: Capture) -> None:
    line = capture.add(torch.ones(2), "input")
    (record,) = read_manifest(capture.dir)
    (capture.dir / line["file"]).unlink()
    with pytest.raises(CaptureError, match=r"mxfp8_input.pt is missing although it is listed"):
        load_tensor(capture.dir, record)


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 torn archive"])
def test_loading_a_corrupt_file_names_it(capture: Capture, content: bytes) -> None:
    line = capture.add(torch.ones(2), "input")
    (record,) = read_manifest(capture.dir)
    (capture.dir / line["file"]).write_bytes(content)
    with pytest.raises(CaptureError, match=r"mxfp8_input.pt is refused: .* is damaged, or"):
        load_tensor(capture.dir, record)


def test_loading_half_a_file_names_it(capture: Capture) -> None:
    line = capture.add(torch.ones(2000), "input")
    (record,) = read_manifest(capture.dir)
    path = capture.dir / line["file"]
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(CaptureError, match="is damaged"):
        load_tensor(capture.dir, record)


@pytest.mark.parametrize("payload", [{"metadata": {}}, [1, 2], {"tensor": 3}])
def test_loading_a_file_without_a_tensor_is_refused(capture: Capture, payload: object) -> None:
    line = capture.add(torch.ones(2), "input")
    (record,) = read_manifest(capture.dir)
    torch.save(payload, capture.dir / line["file"])
    with pytest.raises(CaptureError, match=r"mxfp8_input.pt holds no tensor; was it captured"):
        load_tensor(capture.dir, record)


def test_loading_where_only_statistics_were_kept_says_so(capture: Capture) -> None:
    capture.add(torch.ones(2), "input")["file"] = None
    capture.write()
    (record,) = read_manifest(capture.dir)
    with pytest.raises(CaptureError, match=r"fc1 L0 forward input: only statistics were captured"):
        load_tensor(capture.dir, record)


@pytest.mark.parametrize("file", ["../../x.pt", "/x.pt", "a/../../x.pt"])
def test_a_manifest_cannot_name_a_file_elsewhere(capture: Capture, file: str) -> None:
    capture.add(torch.ones(2), "input")["file"] = file
    capture.write()
    with pytest.raises(CaptureError, match=f"names {file}, which is outside the folder"):
        read_manifest(capture.dir)


def test_tensors_of_a_shard_are_told_apart_and_read(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path, kind=StoreKind.safetensors)
    line = dict.fromkeys(("module", "layer_type", "phase", "component", "quant_type"), "")
    line |= {"layer": 0, "iteration": 1, "micro_batch": 0, "rank": 0, "formats": {}}
    for i in range(3):
        x = torch.full((2,), float(i))
        metadata = {**line, "operation": "forward", "tensor": str(i), "shape": [2]}
        store.add(f"bf16/{i}.pt", x, About.of(metadata | {"dtype": "float32"}))
    assert store.last is not None
    store.refer(store.last, About.of(metadata | {"operation": "backward", "dtype": "float32"}))
    store.close()
    collection = read_collection(tmp_path)
    assert [r.key for r in unique_files(collection.records)] == ["bf16/0", "bf16/1", "bf16/2"]
    for i, record in enumerate(unique_files(collection.records)):
        assert load_tensor(tmp_path, record).tolist() == [i, i]
    (tmp_path / str(collection.records[0].file)).unlink()
    assert read_collection(tmp_path).missing == ("shards/rank0-00001.safetensors",)
