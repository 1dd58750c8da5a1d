from __future__ import annotations

import random

from quantexp.extras.prepare.divided import MAX_TASKS, balanced


def test_few_pieces_have_a_group_each() -> None:
    assert balanced([5, 9, 1], range(3)) == [[0], [1], [2]]
    assert balanced([5, 9, 1], [2, 0]) == [[0], [2]]
    assert balanced([5], []) == []


def test_groups_have_about_the_same_size_and_keep_the_order() -> None:
    assert balanced([8, 1, 7, 2, 9], range(5), 3) == [[0, 1], [2, 3], [4]]


def test_every_piece_is_in_one_group_and_none_is_empty() -> None:
    chance = random.Random(0)
    sizes = [chance.choice([0, 1, 1000, chance.randrange(10**9)]) for _ in range(3000)]
    groups = balanced(sizes, range(len(sizes)))
    assert len(groups) == MAX_TASKS
    assert all(groups)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    assert all(group == sorted(group) for group in groups)
    loads = [sum(sizes[index] for index in group) for group in groups]
    assert max(loads) - min(loads) <= max(sizes)


def test_pieces_of_unknown_size_are_spread() -> None:
    assert [len(group) for group in balanced([0, 0, 0, 0], range(4), 2)] == [2, 2]
