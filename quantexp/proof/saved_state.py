"""Whether a checkpoint has the training state that a rank holds, in some elements of each tensor.

The places of elements are computed one by one here, and their values taken from the mapped file; training copies runs
of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from quantexp.model.pieces import Piece
from quantexp.model.safetensors_header import read_header_and_metadata
from quantexp.model.shards import Shard

#: Elements of a tensor that are compared.
_ELEMENTS = 64
#: By parameter: the piece that a rank holds, some of its elements, and what they are by kind (`exp_avg`).
Elements: TypeAlias = Mapping[str, tuple[Piece, np.ndarray, Mapping[str, np.ndarray]]]


def drawn(number: int, first: float) -> np.ndarray:
    """Some of a tensor's elements, ascending, at equal distances; `first` of [0, 1) says where they begin."""
    return np.unique(((np.arange(_ELEMENTS) + first) * number / _ELEMENTS).astype(np.int64))


def places(piece: Piece, elements: np.ndarray) -> np.ndarray:
    """The places of a piece's elements in the whole parameter, flattened."""
    axis = piece.shard.axis
    index = list(np.unravel_index(piece.start + elements, piece.shard.shape(piece.shape)))
    if axis is not None:
        index[axis] = _lines(piece.shard)[index[axis]]
    return np.ravel_multi_index(index, piece.shape)


def elements_at(piece: Piece, where: np.ndarray) -> np.ndarray:
    """The elements of a piece that lie at places of the whole parameter, flattened; -1 for one that it has not."""
    axis = piece.shard.axis
    index = list(np.unravel_index(where, piece.shape))
    inside = np.ones(len(where), dtype=bool)
    if axis is not None:
        line_of = np.full(piece.shape[axis], -1)
        line_of[_lines(piece.shard)] = np.arange(piece.shard.extent)
        index[axis] = line_of[index[axis]]
        inside = index[axis] >= 0
        index[axis] = index[axis].clip(0)
    flat = np.ravel_multi_index(index, piece.shard.shape(piece.shape)) - piece.start
    return np.where(inside & (flat >= 0) & (flat < piece.numel), flat, -1)


def num_other(files: Iterable[Path], held: Elements) -> dict[str, int]:
    """How many elements are not those of the files, by the name of their tensor there (`exp_avg/NAME`), if any are.

    Args:
        files: of the training state, in float32, which together have every element once.
        held: what a rank holds. Kinds that no file has are not compared.
    """
    wrong: dict[str, int] = {}
    for file in files:
        for key, is_there, is_other in _saved(file, held):
            wrong[key] = wrong.get(key, 0) + int((is_there & is_other).sum())
    return {key: number for key, number in wrong.items() if number}


def num_not_written(file: Path, held: Elements) -> dict[str, int]:
    """How many elements a rank's own file has otherwise, or not at all, by the name of their tensor, if any are.

    Args:
        file: of the training state, in float32.
        held: what the rank writes.
    """
    wrong = {
        f"{kind}/{name}": len(own)
        for name, (_, _, values) in held.items()
        for kind, own in values.items()
    }
    for key, is_there, is_other in _saved(file, held):
        wrong[key] = int((is_other | ~is_there).sum())
    return {key: number for key, number in wrong.items() if number}


def _saved(file: Path, held: Elements) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The tensors of a file that a rank holds part of; which of its elements are there, and which are others there."""
    header, metadata = read_header_and_metadata(file)
    records = json.loads(metadata["pieces"])
    for name in records.keys() & held.keys():
        piece, elements, own = held[name]
        record = records[name]
        shard = Shard(record["axis"], tuple(map(tuple, record["ranges"])))
        saved = Piece(tuple(record["shape"]), shard, *record["flat"])
        at = elements_at(saved, places(piece, elements))
        for kind in own if (at >= 0).any() else ():
            if (key := f"{kind}/{name}") in header:
                start, shape = header[key].start, (saved.numel,)
                whole = np.memmap(file, "<f4", mode="r", offset=start, shape=shape)
                yield key, at >= 0, whole[at] != own[kind]


def _lines(shard: Shard) -> np.ndarray:
    return np.concatenate([np.arange(start, stop) for start, stop in shard.ranges])
