"""Attacks on prepared data: any byte of a pair and of its card changes, at the same size or not."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quantexp.data.binary import pair_paths
from quantexp.data.index import write_index
from quantexp.data.prepared import card_path, check_intact, read_whole
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.errors import DataError
from quantexp.training.megatron.sample_order import open_pair
from tests.data.prepare.made import lines, prepared, rows, texts


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared pair of twenty documents."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "a.jsonl").write_bytes(lines(rows(texts(20))))
    return prepared(folder / "a.jsonl", folder / "own").prefix


@pytest.fixture(scope="module")
def of_megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair without a card; some documents are empty."""
    prefix = tmp_path_factory.mktemp("megatron") / "own"
    bin_path, idx_path = pair_paths(prefix)
    lengths = np.array([3, 0, 1, 50, 7, 0, 2000], "<i4")
    bin_path.write_bytes(np.arange(lengths.sum(), dtype="<u2").tobytes())
    (prefix.parent / "lengths").write_bytes(lengths.tobytes())
    write_index(idx_path, [prefix.parent / "lengths"], np.dtype("<u2"))
    return prefix


def documents(prefix: Path) -> list[list[int]]:
    pair = open_pair(prefix)
    return [pair[i].tolist() for i in range(len(pair.sequence_lengths))]


def read(prefix: Path, cache: Path) -> tuple[object, list[list[int]]]:
    """Reads the parts and documents of a pair as a rank does before it trains."""
    card = read_whole(prefix, ByteTokenizer())
    if card is not None:
        check_intact(prefix, card, cache)
    return card and card.parts(), documents(prefix)


def attempt(prefix: Path, cache: Path) -> tuple[object, str]:
    """The content of a pair, or the message that refuses it."""
    try:
        return read(prefix, cache), ""
    except DataError as error:
        return None, str(error)


def damage(content: bytes, chance: random.Random) -> bytes:
    """Flips bits, overwrites a word with an extreme number, cuts, or inserts."""
    damaged = bytearray(content)
    place = chance.choice((chance.randrange(len(content)), chance.randrange(min(60, len(content)))))
    match chance.randrange(6):
        case 0:
            damaged[place] ^= 1 << chance.randrange(8)
        case 1:
            damaged[place] = chance.randrange(256)
        case 2:
            number = chance.choice((-1, 0, 1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**62))
            damaged[place : place + 8] = number.to_bytes(8, "little", signed=True)
        case 3:
            del damaged[place:]
        case 4:
            damaged[place:place] = chance.randbytes(chance.choice((1, 4, 8, 12, 20)))
        case 5:
            other = chance.randrange(len(content))
            damaged[place : place + 4] = content[other : other + 4]
    return bytes(damaged)


def test_a_changed_file_of_a_prepared_pair_is_refused_or_has_the_same_documents(
    original: Path, tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    expected = read(original, tmp_path / "cache")
    for chance in cases:
        folder = tmp_path / "case"
        shutil.copytree(original.parent, folder)
        files = (*pair_paths(folder / "own"), card_path(folder / "own"))
        path = chance.choice(files)
        path.write_bytes(damage(path.read_bytes(), chance))
        content, message = attempt(folder / "own", tmp_path / "cache")
        assert content == expected or ("own" in message and "\n" not in message)
        if content is not None:
            for path, same in zip(files, pair_paths(original), strict=False):
                assert path.read_bytes() == same.read_bytes()
        shutil.rmtree(folder)


def test_a_changed_index_without_a_card_is_refused_or_has_the_same_documents(
    of_megatron: Path, tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    expected = read(of_megatron, tmp_path / "cache")
    bin_path, idx_path = pair_paths(tmp_path / "own")
    shutil.copyfile(pair_paths(of_megatron)[0], bin_path)
    index = pair_paths(of_megatron)[1].read_bytes()
    for chance in cases:
        idx_path.write_bytes(damage(index, chance))
        content, message = attempt(tmp_path / "own", tmp_path / "cache")
        assert content == expected or (str(idx_path) in message and "\n" not in message)
