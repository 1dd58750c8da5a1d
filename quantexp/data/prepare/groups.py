"""Divides the inputs of a preparation among tasks."""

from __future__ import annotations

from collections.abc import Sequence

from quantexp.data.prepare.inputs import Input

#: Largest number of groups: below the usual limit of a SLURM array (1,001), and few enough to look through.
MAX_GROUPS = 256


def balanced(
    inputs: Sequence[Input], among: Sequence[int], most: int = MAX_GROUPS
) -> list[list[int]]:
    """Returns the inputs `among` in at most `most` groups of about the same number of bytes, none of them empty.

    The largest input goes first, each to the group with the fewest bytes so far. An input is never divided.
    """
    groups = [list[int]() for _ in range(min(most, len(among)))]
    loads = [(0, 0) for _ in groups]  # bytes, and inputs for those of unknown size
    for index in sorted(among, key=lambda index: -inputs[index].num_bytes):
        lightest = loads.index(min(loads))
        num_bytes, number = loads[lightest]
        loads[lightest] = (num_bytes + inputs[index].num_bytes, number + 1)
        groups[lightest].append(index)
    return sorted(sorted(group) for group in groups)
