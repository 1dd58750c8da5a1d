"""Divides pieces of work among tasks."""

from __future__ import annotations

from collections.abc import Sequence

#: Largest number of groups: below the usual limit of a SLURM array (1,001), and few enough to look through.
MAX_GROUPS = 256
#: Smallest number of pieces in a group, if a piece takes a task less time than its start.
MIN_PIECES = 16


def num_groups(num_pieces: int) -> int:
    """The largest number of groups with at least `MIN_PIECES` small pieces each."""
    return min(MAX_GROUPS, num_pieces // MIN_PIECES)


def balanced(sizes: Sequence[int], among: Sequence[int], most: int = MAX_GROUPS) -> list[list[int]]:
    """Returns the pieces `among` in at most `most` groups of about the same size, none of them empty.

    The largest piece goes first, each to the group with the smallest size so far. A piece is never divided.

    Args:
        sizes: of all pieces, for instance in bytes; 0 where it is not known.
        among: the pieces to divide, as indices of `sizes`.
        most: the largest number of groups.
    """
    groups = [list[int]() for _ in range(min(max(1, most), len(among)))]
    loads = [(0, 0) for _ in groups]  # size, and pieces for those of unknown size
    for index in sorted(among, key=lambda index: -sizes[index]):
        lightest = loads.index(min(loads))
        size, number = loads[lightest]
        loads[lightest] = (size + sizes[index], number + 1)
        groups[lightest].append(index)
    return sorted(sorted(group) for group in groups)
