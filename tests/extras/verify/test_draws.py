"""The gold's random numbers are those of Philox4x32-10, by its authors' known answers."""

from __future__ import annotations

import numpy as np
import pytest

from quantexp.extras.verify.draws import random_integer, random_integers, words
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
