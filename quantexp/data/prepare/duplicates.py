"""Which documents are copies of an earlier one, by their hashes, in bounded memory.

Hashes are dealt to as many groups as it takes for one of them to fit into memory, and each group
is sorted by itself: equal hashes are in the same group.
"""

from pathlib import Path

import numpy as np

from quantexp.data.prepare.work import HASH_BYTES

#: Hashes that are sorted at a time (some 400 MB with what sorting takes).
GROUP = 1 << 23
#: Hashes that are read at a time.
_BLOCK = 1 << 20


def mark_first(hashes: Path, marks: Path) -> int:
    """Writes a byte for each hash, 1 for the first of its equals and else 0; returns how many are 0."""
    total = hashes.stat().st_size // HASH_BYTES
    if total == 0:
        marks.write_bytes(b"")
        return 0
    found = np.memmap(marks, np.uint8, "w+", shape=(total,))
    num_groups = -(-total // GROUP)
    for group in range(num_groups):
        numbers, halves = _group(hashes, total, group, num_groups)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equals stay in their order
        ordered = halves[order]
        first = np.ones(len(order), np.uint8)
        first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        found[numbers[order]] = first
    found.flush()
    return total - int(sum(int(found[i : i + _BLOCK].sum()) for i in range(0, total, _BLOCK)))


def _group(hashes: Path, total: int, group: int, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of a group's documents, and their hashes as two uint64 each."""
    content = np.memmap(hashes, "<u8", "r", shape=(total, 2))
    numbers, halves = [], []
    for start in range(0, total, _BLOCK):
        block = np.array(content[start : start + _BLOCK])
        own = np.flatnonzero(block[:, 1] % num_groups == group)
        numbers.append(own + start)
        halves.append(block[own])
    return np.concatenate(numbers), np.concatenate(halves)
