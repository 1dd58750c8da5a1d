"""Whether a rank holds the training state that a checkpoint has, in some elements of each tensor.

The places of elements are computed one by one here, and their values taken from the mapped file; training copies runs
of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from quantexp.model.pieces import Piece
from quantexp.model.safetensors_header import read_header_and_metadata
from quantexp.model.shards import Shard

#: Elements of a tensor that are compared.
_ELEMENTS = 64


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


def num_other(
    files: Iterable[Path], held: Mapping[str, tuple[Piece, np.ndarray, Mapping[str, np.ndarray]]]
) -> dict[str, int]:
    """How many elements are not those of the files, by the name of their tensor there (`exp_avg/NAME`), if any are.

    Args:
        files: of the training state, in float32, which together have every element once.
        held: by parameter: the piece that a rank holds, some of its elements, and what they are by kind (`exp_avg`).
            Kinds that no file has are not compared.
    """
    wrong: dict[str, int] = {}
    for file in files:
        header, metadata = read_header_and_metadata(file)
        records = json.loads(metadata["pieces"])
        for name in records.keys() & held.keys():
            piece, elements, values = held[name]
            record = records[name]
            shard = Shard(record["axis"], tuple(map(tuple, record["ranges"])))
            saved = Piece(tuple(record["shape"]), shard, *record["flat"])
            at = elements_at(saved, places(piece, elements))
            for kind, own in values.items() if (at >= 0).any() else ():
                if (key := f"{kind}/{name}") in header:
                    start, shape = header[key].start, (saved.numel,)
                    whole = np.memmap(file, "<f4", mode="r", offset=start, shape=shape)
                    number = int((whole[at[at >= 0]] != own[at >= 0]).sum())
                    wrong[key] = wrong.get(key, 0) + number
    return {key: number for key, number in wrong.items() if number}


def _lines(shard: Shard) -> np.ndarray:
    return np.concatenate([np.arange(start, stop) for start, stop in shard.ranges])
