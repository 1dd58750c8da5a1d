"""The test tensors contain the hard cases."""

from __future__ import annotations

import numpy as np
import pytest

from quantexp.extras.verify import cases
from quantexp.extras.verify.grids import ELEMENTS, grid


def test_hard_amaxes_surround_every_power_of_two_and_the_largest_value_times_it() -> None:
    amaxes = set(cases.hard_amaxes("mxfp8_e4m3").tolist())
    for exponent in (-126, -9, 0, 100):
        for turn in (1.0, 1.75, 1.9375):
            centre = np.float32(turn * 2.0**exponent)
            assert float(centre) in amaxes
            for to in (0, np.inf):
                assert float(np.nextafter(centre, np.float32(to))) in amaxes
    assert 2.0**-149 in amaxes
    assert float(np.finfo(np.float32).max) not in amaxes
    assert float(np.nextafter(np.float32(2.0**127), np.float32(0))) in amaxes


@pytest.mark.parametrize("element", ELEMENTS)
def test_hard_values_contain_every_tie_with_its_neighbours(element: str) -> None:
    x = set(cases.hard_values(element).tolist())
    points = grid(element).magnitudes
    for tie in (points[:-1] + points[1:]) / 2:
        for value in (
            tie,
            *(float(np.nextafter(np.float32(tie), np.float32(t))) for t in (0, 9e9)),
        ):
            assert {value, -value} <= x


@pytest.mark.parametrize("t", [1.0, 0.37])
def test_the_largest_of_a_hard_block_is_its_first(t: float) -> None:
    for blocks in (cases.hard_nv_blocks(t), cases.hard_blocks("mxfp4_e2m1", "floor")):
        assert (np.abs(blocks).max(axis=1) == blocks[:, 0]).all()
        assert (blocks == 0).sum() > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_neighbours_and_strangers_are_all_values_of_the_dtype(dtype: str) -> None:
    every = np.sort(cases.every_value(dtype).view(np.uint32))
    assert len(np.unique(every)) == 1 << 16
    for arranged in (cases.by_magnitude(dtype, 32), cases.shuffled(dtype, 32)):
        assert np.array_equal(np.sort(arranged.reshape(-1).view(np.uint32)), every)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_random_blocks_contain_zeros_infinities_and_nan(dtype: str) -> None:
    x = cases.random_blocks(256, 16, dtype)
    assert np.isnan(x).any()
    assert np.isposinf(x).any()
    assert np.isneginf(x).any()
    assert ((x == 0) & np.signbit(x)).any()
    assert (x == 0).all(axis=1).any()
    assert np.isfinite(x).all(axis=1).mean() > 0.5
