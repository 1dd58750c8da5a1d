"""Reading published weights from disk; transformers and the safetensors library write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantexp.errors import DataError
from quantexp.model.huggingface.weights import open_weights, read_rows
from tests.model.huggingface.published import LLAMA31, published_model, write

TENSORS = {
    "a": torch.arange(60, dtype=torch.bfloat16).view(12, 5),
    "b": torch.arange(7, dtype=torch.float32),
    "c": torch.arange(8, dtype=torch.float16).view(2, 4),
}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_header_has_names_shapes_and_dtypes(single: Path) -> None:
    tensors = open_weights(single).tensors
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        "a": ((12, 5), "BF16"),
        "b": ((7,), "F32"),
        "c": ((2, 4), "F16"),
    }


def test_rows_are_those_that_the_library_reads(single: Path) -> None:
    tensors = open_weights(single / "model.safetensors").tensors
    assert torch.equal(read_rows(tensors["a"], 3, 4), TENSORS["a"][3:7])
    assert torch.equal(read_rows(tensors["b"], 0, 7), TENSORS["b"])
    assert torch.equal(read_rows(tensors["c"], 1, 1), TENSORS["c"][1:])


def test_columns_are_those_of_a_slice(single: Path) -> None:
    stored = open_weights(single).tensors["a"]
    for columns in ((0, 5), (0, 2), (1, 4), (4, 5)):
        expected = TENSORS["a"][3:7, slice(*columns)]
        assert torch.equal(read_rows(stored, 3, 4, columns), expected)


def test_file_that_is_cut_after_it_was_opened_is_an_error(single: Path) -> None:
    tensors = open_weights(single).tensors
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    last = max(tensors.values(), key=lambda each: each.stop)
    with pytest.raises(DataError, match=r"model\.safetensors lacks \d+ bytes: it was cut while"):
        read_rows(last, last.shape[0] - 1, 1)
    file.unlink()
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read: No such file"):
        read_rows(tensors["a"], 0, 1)


def test_header_of_odd_length_is_read_too(tmp_path: Path) -> None:
    """The format does not require values at a multiple of their size."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 - len(header) % 2)
    values = torch.tensor([1.5, -2.0])
    content = len(header).to_bytes(8, "little") + header + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    assert torch.equal(read_rows(open_weights(tmp_path).tensors["x"], 0, 2), values)


def test_shards_are_one_model_and_their_division_is_not_in_the_fingerprint(tmp_path: Path) -> None:
    model = published_model(LLAMA31)
    whole = write(model, LLAMA31, tmp_path / "whole")
    shards = write(model, LLAMA31, tmp_path / "shards", max_shard_size="40KB")
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    one, several = open_weights(whole), open_weights(shards)
    assert (
        one.tensors.keys()
        == several.tensors.keys()
        == load_file(whole / "model.safetensors").keys()
    )
    assert one.fingerprint() == several.fingerprint()
    assert open_weights(shards / "model.safetensors.index.json").fingerprint() == one.fingerprint()


@pytest.mark.parametrize("size", [8, 1 << 19])
def test_fingerprint_sees_first_and_last_value_name_shape_and_dtype(
    tmp_path: Path, size: int
) -> None:
    file = tmp_path / "model.safetensors"

    def fingerprint(name: str, tensor: torch.Tensor) -> str:
        save_file({name: tensor}, file)
        return open_weights(tmp_path).fingerprint()

    x = torch.zeros(2, size)
    first, last = x.clone(), x.clone()
    first[0, 0] = last[-1, -1] = 1
    others = [("x", first), ("x", last), ("y", x), ("x", x.view(size, 2)), ("x", x.bfloat16())]
    assert len({fingerprint(*each) for each in [("x", x), *others]}) == 6


def test_missing_weights_are_reported_with_their_place(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"nowhere is missing; give a folder with model\.safetensors or"
    ):
        open_weights(tmp_path / "nowhere")
    with pytest.raises(
        DataError, match=r"holds neither model\.safetensors nor model\.safetensors\.ind"
    ):
        open_weights(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"pytorch_model\.bin is a pickle, which could run code, and is"
    ):
        open_weights(tmp_path)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    files = {f"t{i}": f"model-{i}.safetensors" for i in range(7)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(
        DataError, match=r"not beside it: model-0\.saf.*model-4\.safetensors and 2 more; fetch"
    ):
        open_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(DataError, match=r"not beside it: \.\./secret"):
        open_weights(tmp_path)
    index.write_text("[]")
    with pytest.raises(
        DataError, match="is no index of shards: it has no weight_map that names files"
    ):
        open_weights(tmp_path)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for i in (1, 2):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{i}.safetensors")
    names = {"x": "1.safetensors", "y": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(
        DataError, match=r"x is in .*1\.safetensors and in .*2\.safetensors: a shard of ano"
    ):
        open_weights(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 5, 9, 200, -1])
def test_cut_file_is_refused(single: Path, num_bytes: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(DataError, match=r"model\.safetensors is not a complete safetensors file: "):
        open_weights(single)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"shape": [2]}, "data_offsets"),
        (
            {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
            r"a F32 tensor of shape \[3\] in 8 by",
        ),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "a tensor lies outside it"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "no shape of whole"),
        (5, "not a complete safetensors file"),
    ],
)
def test_header_that_does_not_describe_the_file_is_refused(
    tmp_path: Path, entry: object, words: str
) -> None:
    header = json.dumps({"x": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=words):
        open_weights(tmp_path)
