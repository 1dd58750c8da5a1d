"""The parts of an operand that are examined for other formats than the declared one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: How many parts.
WINDOWS = 16


def windows_of(x: Tensor, axis: int, block: int) -> Tensor:
    """Evenly spread parts of x, as [windows, lines, elements along the axis], with whole blocks in both directions.

    Each has 32 lines of at least 64 elements (fewer if x has fewer), starting at multiples of these.
    """
    lines = x.movedim(axis, -1)
    while lines.dim() < 3:
        lines = lines.unsqueeze(0)
    height, width = min(32, lines.shape[-2]), min(max(64, block), lines.shape[-1])
    counts = (*lines.shape[:-2], lines.shape[-2] // height, lines.shape[-1] // width)
    total = math.prod(counts)
    picked = []
    for i in range(min(WINDOWS, total)):
        *stack, row, column = _unravel(
            i * (total - 1) // max(1, WINDOWS - 1) if total > WINDOWS else i, counts
        )
        window = lines[tuple(stack)] if stack else lines
        picked.append(
            window[row * height : (row + 1) * height, column * width : (column + 1) * width]
        )
    return torch.stack(picked)


def _unravel(flat: int, shape: tuple[int, ...]) -> list[int]:
    indices: list[int] = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        indices.insert(0, index)
    return indices
