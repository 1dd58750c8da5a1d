"""Hashes of a checkpoint: every kind of damage is detected and named, with the checkpoint before it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from quantexp.errors import DataError
from quantexp.model.checkpoint_hashes import HASHES, hash_of, record_hashes, require_intact
from quantexp.model.checkpoints import STATE

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
