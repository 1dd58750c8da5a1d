"""Hashes of a checkpoint: every kind of damage is detected and named, with the checkpoint before it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantexp.errors import DataError, RunError
from quantexp.model.checkpoint_hashes import (
    HASHES,
    PIECE,
    hash_of,
    record_hashes,
    require_intact,
    write_hashed,
)
from quantexp.model.checkpoints import STATE
from quantexp.model.safetensors import described

WEIGHTS, RANK = "model.safetensors", f"{STATE}/rank00000.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The second of two checkpoints."""
    for iteration in (2, 4):
        folder = tmp_path / f"iteration_{iteration:08d}"
        folder.mkdir()
        save_file({"a": torch.ones(8), "b": torch.arange(8.0)}, folder / WEIGHTS)
        (folder / STATE).mkdir()
        save_file({"main/a": torch.ones(8) * iteration}, folder / RANK)
        (folder / "config.json").write_text("{}\n")
        record_hashes(folder)
    return folder


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def refused(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        require_intact(folder)
    return str(caught.value)


def test_intact_checkpoint_passes_and_so_does_one_of_an_earlier_version(checkpoint: Path) -> None:
    require_intact(checkpoint)
    require_intact(checkpoint / WEIGHTS)
    (checkpoint / HASHES).unlink()
    flip(checkpoint / WEIGHTS, -1)
    require_intact(checkpoint)


def test_every_file_and_tensor_is_recorded(checkpoint: Path) -> None:
    files = json.loads((checkpoint / HASHES).read_bytes())["files"]
    assert set(files) == {WEIGHTS, RANK, "config.json"}
    for name, recorded in files.items():
        content = (checkpoint / name).read_bytes()
        assert recorded["bytes"] == len(content)
        assert recorded["xxh3_128"] == xxhash.xxh3_128_hexdigest(content)
    ones = xxhash.xxh3_128_hexdigest(torch.ones(8).numpy().tobytes())
    assert files[WEIGHTS]["tensors"]["a"] == ones
    assert set(files[WEIGHTS]["tensors"]) == {"a", "b"}


@pytest.mark.parametrize("name", [WEIGHTS, RANK, "config.json"])
def test_any_flipped_bit_is_noticed(checkpoint: Path, name: str) -> None:
    size = (checkpoint / name).stat().st_size
    for place in range(0, size, max(1, size // 50)):
        flip(checkpoint / name, place)
        assert refused(checkpoint).startswith(f"{checkpoint / name} is damaged: its content ")
        flip(checkpoint / name, place)
    require_intact(checkpoint)


def test_message_names_the_tensor_and_the_checkpoint_before_it(checkpoint: Path) -> None:
    flip(checkpoint / WEIGHTS, -1)
    assert refused(checkpoint) == (
        f"{checkpoint / WEIGHTS} is damaged: its content is not what was saved (first in b); "
        f"the checkpoint before it is {checkpoint.with_name('iteration_00000002')}"
    )


def test_first_checkpoint_has_none_before_it(checkpoint: Path) -> None:
    first = checkpoint.with_name("iteration_00000002")
    (first / RANK).unlink()
    assert refused(first) == f"{first / RANK} is missing; there is none before it"


def test_shortened_file_is_named_with_its_sizes(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    assert re.search(
        r"config\.json is damaged: it has 1 bytes, 3 were saved; ", refused(checkpoint)
    )


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}', '{"files": {"config.json": 1}}'])
def test_damaged_list_of_hashes_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / HASHES).write_text(text)
    words = r" cannot be read \(|, line 1: |: it must be keys with values, got a list"
    assert re.match(rf"{re.escape(str(checkpoint / HASHES))}({words})", refused(checkpoint))


def test_files_that_are_not_read_are_not_checked(checkpoint: Path) -> None:
    flip(checkpoint / RANK, -1)
    require_intact(checkpoint, [STATE])
    require_intact(checkpoint, only=[WEIGHTS])
    with pytest.raises(DataError, match=r"rank00000\.safetensors is damaged"):
        require_intact(checkpoint, only=[RANK])
    (checkpoint / RANK).unlink()
    require_intact(checkpoint, [STATE])


def test_hashes_of_other_processes_are_recorded_as_they_are(tmp_path: Path) -> None:
    """Rank 0 does not read what other ranks wrote."""
    (tmp_path / STATE).mkdir()
    save_file({"main/a": torch.ones(8)}, tmp_path / RANK)
    other = hash_of(tmp_path / RANK)
    save_file({"main/a": torch.zeros(8)}, tmp_path / RANK)
    record_hashes(tmp_path, None, {RANK: other})
    with pytest.raises(DataError, match=r"content is not what was saved \(first in main/a\)"):
        require_intact(tmp_path)


def test_damaged_weights_elsewhere_have_to_be_copied_again(tmp_path: Path) -> None:
    save_file({"a": torch.ones(8)}, tmp_path / WEIGHTS)
    record_hashes(tmp_path)
    flip(tmp_path / WEIGHTS, -1)
    assert refused(tmp_path).endswith("(first in a); copy the weights again")


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
