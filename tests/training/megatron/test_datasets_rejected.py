"""Pairs, splits and caches that are refused before training."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.data.binary import pair_paths
from quantexp.data.prepared import card_path
from quantexp.data.sources import Document
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.errors import DataError
from quantexp.training.megatron.data_loader import Datasets, build_datasets
from tests.data.pairs import write_binary

from .conftest import T


def test_a_missing_pair_is_rejected(build: Callable[..., Datasets], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected .*none\.bin and .*none\.idx"):
        build(tmp_path / "none")


@pytest.mark.parametrize("split", ["", "a", "1,-1", "1;2", "0,0,0", "1,2,3,4", "nan"])
def test_a_split_that_is_not_a_list_of_weights_is_rejected(
    build: Callable[..., Datasets], split: str
) -> None:
    with pytest.raises(DataError, match=rf"dataset\.split must be the weights .*, got {split}$"):
        build(split=split)


@pytest.mark.parametrize(
    ("split", "part"), [("0,1", "training"), ("999,1", "validation"), ("1", "validation")]
)
def test_a_split_that_leaves_a_required_part_empty_is_rejected(
    build: Callable[..., Datasets], plain: Path, split: str, part: str
) -> None:
    message = (
        rf"has 40 documents, of which dataset\.split={split} leaves none for {part}: give more"
    )
    with pytest.raises(DataError, match=message):
        build(plain, split=split, num_samples_valid=1)


def test_the_dataset_of_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    class Small(ByteTokenizer):
        vocab_size = 100

    write_binary([Document("1", "\x7f", "test")], tmp_path / "a", ByteTokenizer())
    with pytest.raises(DataError, match=r"a\.bin has id 256, but the tokenizer has 100 ids: set"):
        build_datasets(
            tmp_path / "a", Small(), seq_length=1, seed=1, num_samples_train=1, cache_dir=tmp_path
        )


def test_a_cache_that_cannot_be_written_is_rejected(
    build: Callable[..., Datasets], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/index-"):
        build(cache_dir=tmp_path / "file")


def test_a_prepared_pair_rejects_another_split(build: Callable[..., Datasets]) -> None:
    with pytest.raises(
        DataError, match=r"was prepared with dataset\.split=95,5,0, got 90,10; drop"
    ):
        build(split="90,10")


def test_a_pair_that_differs_from_its_card_is_rejected(
    build: Callable[..., Datasets], prefix: Path, tmp_path: Path
) -> None:
    for path in (*pair_paths(prefix), card_path(prefix)):
        shutil.copy(path, tmp_path / f"own{path.suffix}")
    with (tmp_path / "own.bin").open("ab") as stream:
        stream.write(b"xx")
    with pytest.raises(
        DataError, match=r"own\.bin has .* bytes where .*own\.json says .*: copy or"
    ):
        build(tmp_path / "own")
    (tmp_path / "own.json").write_text("{")
    with pytest.raises(DataError, match=r"own\.json, line 1: .*; prepare the dataset again"):
        build(tmp_path / "own")
    (tmp_path / "own.json").write_text('{"version": 0}')
    with pytest.raises(
        DataError, match=r"own\.json: no card of this version .*version 0.*; prepare"
    ):
        build(tmp_path / "own")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_pair_with_one_changed_bit_is_rejected(
    build: Callable[..., Datasets], prefix: Path, tmp_path: Path, suffix: str
) -> None:
    for path in (*pair_paths(prefix), card_path(prefix)):
        shutil.copy(path, tmp_path / f"own{path.suffix}")
    build(tmp_path / "own")
    content = bytearray((tmp_path / f"own{suffix}").read_bytes())
    content[200] ^= 1
    (tmp_path / f"own{suffix}").write_bytes(content)
    with pytest.raises(
        DataError, match=rf"own\{suffix} has changed since it was prepared: its hash"
    ):
        build(tmp_path / "own")


def test_a_prepared_pair_is_rejected_with_another_tokenizer(prefix: Path, tmp_path: Path) -> None:
    class Other(ByteTokenizer):
        def fingerprint(self) -> str:
            return "f" * 64

    with pytest.raises(
        DataError, match=r"prepared with another tokenizer \(byte, 257 ids, 2a10.*fff"
    ):
        build_datasets(
            prefix, Other(), seq_length=T, seed=1, num_samples_train=1, cache_dir=tmp_path
        )
