from __future__ import annotations

import pytest

from quantexp.capture.statistics.counts import Counts, from_json, of_exponents


def test_empty_ends_are_left_out() -> None:
    assert of_exponents([0, 0, 3, 0, 1, 0], -5) == Counts(-3, (3, 0, 1))
    assert of_exponents([0, 0], 7) == Counts()


def test_sums_align_their_integers() -> None:
    assert Counts(-3, (1, 2)) + Counts(-1, (5,)) == Counts(-3, (1, 2, 5))
    assert Counts(4, (1,)) + Counts(0, (2,)) == Counts(0, (2, 0, 0, 0, 1))
    assert Counts() + Counts(2, (1,)) == Counts(2, (1,)) == Counts(2, (1,)) + Counts()


@pytest.mark.parametrize(("share", "value"), [(0.0, -3), (0.25, -3), (0.5, -1), (1.0, 0)])
def test_quantiles_are_integers_that_occur(share: float, value: int) -> None:
    assert Counts(-3, (1, 0, 2, 1)).quantile(share) == value


def test_empty_counts_have_no_quantile() -> None:
    assert Counts().quantile(0.5) is None


def test_one_integer_can_be_removed() -> None:
    assert Counts(-127, (4, 0, 0, 2)).without(-127) == (Counts(-124, (2,)), 4)
    assert Counts(1, (2, 3)).without(9) == (Counts(1, (2, 3)), 0)


def test_a_captures_histogram_is_read() -> None:
    assert from_json({"first": -2, "counts": [1, 0, 4]}) == Counts(-2, (1, 0, 4))
    assert from_json({"first": None, "counts": []}) == from_json(None) == Counts()


@pytest.mark.parametrize("counts", [Counts(-2, (1, 0, 4)), Counts()])
def test_a_histogram_is_read_back_unchanged(counts: Counts) -> None:
    assert from_json(counts.json()) == counts
    assert Counts().json() == {"first": None, "counts": []}
