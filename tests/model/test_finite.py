"""Which values are finite, and the words of a checkpoint that has others."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from quantexp.errors import RunError
from quantexp.model.finite import (
    count_words,
    first_nonfinite,
    is_finite,
    require_finite,
    tensors_in,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 4096, 40_001])
def test_one_value_anywhere_is_noticed(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for value in (math.nan, math.inf, -math.inf):
        x = torch.randn(size, generator=generator).to(dtype)
        assert is_finite(x)
        x[int(torch.randint(0, size, (), generator=generator))] = value
        assert not is_finite(x)
        assert count_words(x) == f"1 of {size:,} values are NaN or Inf"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_that_overflows_is_no_sign_of_a_bad_value(dtype: torch.dtype) -> None:
    x = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(x)
    assert not is_finite(torch.cat([x, torch.tensor([math.inf, -math.inf], dtype=dtype)]))


def test_empty_and_whole_numbers_are_finite() -> None:
    assert is_finite(torch.empty(0))
    assert is_finite(torch.tensor([1, 2]))


def test_state_is_searched_through_dicts_lists_and_floats() -> None:
    state = {"a": [torch.ones(2), {"b": 1.0}], "c": "text", "d": {"e": (2, math.nan)}}
    names = [name for name, _ in tensors_in(state)]
    assert names == ["a.0", "a.1.b", "d.e.1"]
    first = first_nonfinite(tensors_in(state))
    assert first is not None
    assert first[0] == "d.e.1"


def test_checkpoint_is_refused_by_the_name_of_its_tensor() -> None:
    good, bad = torch.ones(2), torch.tensor([1, math.nan])
    with pytest.raises(
        RunError, match=r"the checkpoint x is not written: 1 of 2 values are NaN or Inf in bad; "
    ):
        require_finite([("good", good), ("bad", bad)], Path("x"))
