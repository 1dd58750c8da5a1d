"""Tiles: every query is in exactly one, and blocks are whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantexp.formats import resolve
from quantexp.quant.attention.tiles import LEAST, ROWS, Tile, tiles

BLOCKS_OF_256 = resolve("mxfp8_e4m3", block=256)


def spans(parts: list[Tile]) -> list[tuple[int, int, int]]:
    return [(tile.start, tile.stop, tile.num_keys) for tile in parts]


def test_tiles_follow_each_other_and_see_all_keys() -> None:
    assert spans(tiles(300, [], to_last_query=False)) == [
        (0, 128, 300),
        (128, 256, 300),
        (256, 300, 300),
    ]


def test_keys_go_to_the_last_query_in_whole_blocks() -> None:
    assert spans(tiles(300, [], to_last_query=True)) == [
        (0, 128, 128),
        (128, 256, 256),
        (256, 300, 300),
    ]
    assert spans(tiles(600, [BLOCKS_OF_256], to_last_query=True)) == [
        (0, 256, 256),
        (256, 512, 512),
        (512, 600, 600),
    ]


def test_transforms_are_blocks_too() -> None:
    transformed = replace(resolve("mxfp8_e4m3"), hadamard_block=256)
    assert spans(tiles(512, [transformed], to_last_query=True))[0] == (0, 256, 256)


@pytest.mark.parametrize("num_tokens", [1, LEAST, ROWS - 1, ROWS, ROWS + 1, ROWS + LEAST - 1])
def test_few_queries_are_one_tile(num_tokens: int) -> None:
    (tile,) = tiles(num_tokens, [], to_last_query=True)
    assert tile == Tile(0, 0, num_tokens, num_tokens, last=True)


def test_a_remainder_that_is_long_enough_is_a_tile_of_its_own() -> None:
    first, last = tiles(ROWS + LEAST, [], to_last_query=True)
    assert (first.stop, last.start, last.stop) == (ROWS, ROWS, ROWS + LEAST)
    assert (first.last, last.last, last.index) == (False, True, 1)
    assert (last.rows, first.keys) == (slice(ROWS, ROWS + LEAST), slice(ROWS))
