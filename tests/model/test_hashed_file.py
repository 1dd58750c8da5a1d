"""A checkpoint's file holds the tensors, its hashes are those of what is on the disk, and no NaN gets there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from quantexp.errors import RunError
from quantexp.model.checkpoint_hashes import hash_of
from quantexp.model.hashed_file import PIECE, write_hashed
from quantexp.model.safetensors import described

#: Float32 elements of a piece.
ONE = PIECE // 4


def tensors() -> dict[str, Tensor]:
    """Of each dtype, with and without values, shorter and longer than a piece, and not contiguous."""
    draw = torch.Generator().manual_seed(0)
    return {
        "main/long": torch.randn(2 * ONE + 3, generator=draw),
        "exact": torch.randn(2, ONE // 2, generator=draw),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "bf16": torch.randn(PIECE, generator=draw).bfloat16(),
        "turned": torch.randn(6, 5, generator=draw).half().T,
        "steps": torch.arange(3),
    }


def write(path: Path, content: dict[str, Tensor]) -> dict[str, object]:
    hashes = write_hashed(path, described(content), content.values(), {"a": "b"}, Path("folder"))
    return dict(hashes)


def test_what_is_on_the_disk_is_the_tensors_and_has_the_hashes(tmp_path: Path) -> None:
    content, path = tensors(), tmp_path / "file.safetensors"
    hashes = write(path, content)
    read = load_file(path)
    assert read.keys() == content.keys()
    assert all(torch.equal(read[name], x) for name, x in content.items())
    assert all(read[name].dtype is x.dtype for name, x in content.items())
    stored = path.read_bytes()
    assert hashes["bytes"] == len(stored)
    assert hashes["xxh3_128"] == xxhash.xxh3_128_hexdigest(stored)
    values = {name: x.contiguous().view(-1).view(torch.uint8) for name, x in content.items()}
    assert hashes["tensors"] == {
        name: xxhash.xxh3_128_hexdigest(x.numpy().tobytes()) for name, x in values.items()
    }
    floats = {name: x for name, x in content.items() if x.is_floating_point()}
    other = tmp_path / "floats.safetensors"
    assert write(other, floats) == hash_of(other)


@pytest.mark.parametrize("at", [0, ONE - 1, ONE, 2 * ONE + 2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_value_in_any_piece_is_refused_and_leaves_no_file(
    tmp_path: Path, at: int, value: float
) -> None:
    content = tensors()
    content["main/long"][at] = value
    words = rf"^the checkpoint folder is not written: 1 of {2 * ONE + 3:,} values are NaN or Inf in long; "
    with pytest.raises(RunError, match=words):
        write(tmp_path / "file.safetensors", content)
    assert not list(tmp_path.iterdir())


def test_a_sum_that_overflows_in_a_piece_is_no_bad_value(tmp_path: Path) -> None:
    content = {"large": torch.full((ONE,), torch.finfo(torch.float32).max)}
    write(tmp_path / "file.safetensors", content)
    assert torch.equal(load_file(tmp_path / "file.safetensors")["large"], content["large"])
