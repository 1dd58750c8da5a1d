"""Finds documents that are copies of an earlier one, by their hashes, in bounded memory.

The hashes are distributed over groups small enough to fit in memory, and each group is sorted separately: equal hashes
are in the same group.
"""

from pathlib import Path

import numpy as np

from quantexp.data.prepare.work import HASH_BYTES

#: Hashes sorted at a time (some 400 MB including the sort).
GROUP = 1 << 23
#: Hashes read at a time.
_BLOCK = 1 << 20


def mark_first(hashes: Path, marks: Path) -> int:
    """Writes one byte per hash, 1 for the first of equal ones and else 0; returns the number of zeros."""
    total = hashes.stat().st_size // HASH_BYTES
    if total == 0:
        marks.write_bytes(b"")
        return 0
    is_first = np.memmap(marks, np.uint8, "w+", shape=(total,))
    num_groups = -(-total // GROUP)
    for group in range(num_groups):
        numbers, halves = _group(hashes, total, group, num_groups)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal hashes keep their order
        ordered = halves[order]
        first = np.ones(len(order), np.uint8)
        first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        is_first[numbers[order]] = first
    is_first.flush()
    num_first = sum(int(is_first[i : i + _BLOCK].sum()) for i in range(0, total, _BLOCK))
    return total - num_first


def _group(hashes: Path, total: int, group: int, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of a group's documents, and their hashes as two uint64 each."""
    content = np.memmap(hashes, "<u8", "r", shape=(total, 2))
    numbers, halves = [], []
    for start in range(0, total, _BLOCK):
        block = np.array(content[start : start + _BLOCK])
        own = np.flatnonzero(block[:, 1] % num_groups == group)
        numbers.append(own + start)
        halves.append(block[own])
    return np.concatenate(numbers), np.concatenate(halves)
