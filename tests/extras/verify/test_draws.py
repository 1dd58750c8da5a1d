"""The gold's random numbers equal those of Python's integers."""

from __future__ import annotations

import pytest

from quantexp.extras.verify.draws import random_integers
from quantexp.extras.verify.rational import random_integer


@pytest.mark.parametrize("seed", [0, 2**32 + 7, 2**64 - 1])
@pytest.mark.parametrize("offset", [0, 2**40, 2**64 - 1])
@pytest.mark.parametrize("count", [1, 41])
def test_numbers_are_those_of_python(seed: int, offset: int, count: int) -> None:
    expected = [random_integer(index, seed, offset) for index in range(count)]
    assert random_integers(count, seed, offset).tolist() == expected
