"""The gold's random numbers are those of Philox4x32-10, by its authors' known answers."""

from __future__ import annotations

import numpy as np
import pytest

from quantexp.extras.verify.draws import (
    butterflies,
    factor,
    random_integer,
    random_integers,
    signs_of,
    sylvester,
    transformed,
    words,
)
from tests.formats.test_philox import KNOWN


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_words_are_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    counters = np.array([counter[0] + (counter[1] << 32)], np.uint64)
    seed, offset = key[0] + (key[1] << 32), counter[2] + (counter[3] << 32)
    assert tuple(words(counters, seed, offset)[0]) == expected


@pytest.mark.parametrize("count", [1, 41])
def test_a_position_has_a_word_of_its_counter(count: int) -> None:
    seed, offset = 2**32 + 7, 2**40
    four = words(np.arange(11, dtype=np.uint64), seed, offset)
    expected = [int(four[i // 4, i % 4]) >> 8 for i in range(count)]
    assert random_integers(count, seed, offset).tolist() == expected
    assert [random_integer(i, seed, offset) for i in range(count)] == expected


@pytest.mark.parametrize("size", [1, 2, 8, 32])
@pytest.mark.parametrize("left", [True, False])
def test_whole_numbers_are_multiplied_with_the_matrix(size: int, left: bool) -> None:
    x = np.arange(3 * size).reshape(3, size) - 7.0
    expected = x @ sylvester(size) * factor(size, left=left)
    assert butterflies(x, left=left).tolist() == expected.tolist()


def test_the_factors_of_both_operands_cancel_the_matrix() -> None:
    for size in (2, 4, 8, 128):
        assert factor(size, left=True) * factor(size, left=False) * size == 1
        assert np.array_equal(sylvester(size) @ sylvester(size), size * np.eye(size))


def test_a_short_last_block_is_cut_into_powers_of_two_and_signs_repeat() -> None:
    x = np.arange(13.0, dtype=np.float32)[None]
    signs = np.array([1, -1, 1, 1, 1, 1, 1, -1], np.float32)
    signed = x * np.resize(signs, 13)
    parts = [butterflies(signed[:, a:b], left=True) for a, b in ((0, 8), (8, 12), (12, 13))]
    result = transformed(x, -1, 8, left=True, signs=signs)
    assert result.tolist() == np.concatenate(parts, axis=1).tolist()


def test_signs_follow_the_highest_bit() -> None:
    expected = [1.0 if random_integer(i, 3, 4) < 2**23 else -1.0 for i in range(32)]
    assert signs_of(32, 3, 4).tolist() == expected
