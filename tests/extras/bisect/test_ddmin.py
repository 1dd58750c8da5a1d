"""Delta debugging finds planted sets, tests none twice, and what it finds is 1-minimal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from quantexp.extras.bisect.search import CachedTests, Subset, ddmin, minimal_cure, minimal_sets

Fails = Callable[[Subset], bool]


def planted(*sets: Sequence[int]) -> Fails:
    """Fails if it holds one of these sets whole."""
    return lambda subset: any(set(each) <= subset for each in sets)


class Counting:
    def __init__(self, fails: Fails) -> None:
        self.fails, self.tested = fails, list[list[Subset]]()

    def __call__(self, subsets: Sequence[Subset]) -> list[bool]:
        self.tested.append(list(subsets))
        return [self.fails(each) for each in subsets]


def search(fails: Fails, size: int) -> tuple[Subset, Counting]:
    counting = Counting(fails)
    return ddmin(frozenset(range(size)), CachedTests(counting)), counting


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_every_single_culprit_is_found(size: int) -> None:
    for culprit in range(size):
        found, counting = search(planted([culprit]), size)
        assert found == {culprit}
        tested = list(itertools.chain(*counting.tested))
        assert len(tested) == len(set(tested))


@pytest.mark.parametrize("size", [2, 5, 8])
def test_every_pair_that_fails_together_is_found(size: int) -> None:
    for pair in itertools.combinations(range(size), 2):
        assert search(planted(pair), size)[0] == set(pair)


def test_all_of_them_may_be_needed() -> None:
    assert search(planted(range(6)), 6)[0] == set(range(6))


def test_what_is_found_is_minimal_also_if_failing_is_not_monotone() -> None:
    def fails(subset: Subset) -> bool:
        return len(subset) in (7, 4, 3) or subset == frozenset(range(9))

    found, _ = search(fails, 9)
    assert fails(found)
    assert not any(fails(found - {unit}) for unit in found)


def test_a_round_is_passed_on_together() -> None:
    _, counting = search(planted([0], [3]), 4)
    assert counting.tested[0] == [frozenset({0, 1}), frozenset({2, 3})]


def test_a_culprit_among_64_takes_few_rounds() -> None:
    _, counting = search(planted([37]), 64)
    assert len(counting.tested) == 6
    assert sum(map(len, counting.tested)) == 12


def test_independent_culprits_are_all_found_and_cured_by_one_of_each() -> None:
    units = frozenset(range(8))
    tests = CachedTests(Counting(planted([1], [4, 6])))
    found = minimal_sets(units, tests)
    assert sorted(map(sorted, found)) == [[1], [4, 6]]
    cure = minimal_cure(units, frozenset().union(*found), tests)
    assert 1 in cure
    assert len(cure) == 2
    assert not tests([units - cure])[0]
    assert all(tests([units - (cure - {unit})])[0] for unit in cure)


def test_cached_results_keep_their_order() -> None:
    tests = CachedTests(Counting(planted([0])))
    first, second = frozenset({0}), frozenset({1})
    assert tests([second, first, second]) == [False, True, False]
    assert list(tests.results) == [second, first]
