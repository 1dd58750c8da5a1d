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
    parts = lines.unfold(-2, height, height).unfold(-2, width, width)
    shape = parts.shape[:-2]
    total = math.prod(shape)
    number = min(WINDOWS, total)
    places = [i * (total - 1) // max(1, number - 1) for i in range(number)]
    return parts[torch.unravel_index(torch.tensor(places, device=x.device), shape)]
