"""Rounds to an element that is a list of values: see `arithmetic`."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from quantexp.formats.rounding import RANDOM_BITS
from quantexp.formats.types import Element, Rounding


def on_list(v: Tensor, element: Element, rounding: Rounding, random: Tensor | None) -> Tensor:
    """v rounded to a list of values, in float64, in which the middle of two float32 values is exact."""
    values, wins_up = _list_tables(element, rounding, v.device)
    wide = v.double().clamp_(element.values[0], element.values[-1]).contiguous()
    high = torch.searchsorted(values, wide).clamp_(1, values.numel() - 1)
    low_value, high_value = values[high - 1], values[high]
    if rounding is Rounding.STOCHASTIC:
        assert random is not None
        fraction = (wide - low_value) / (high_value - low_value)
        # Away from zero with the probability that preserves the mean.
        outwards = torch.where(low_value + high_value < 0, 1 - fraction, fraction)
        moves = random < (outwards * 2.0**RANDOM_BITS).floor_()
        is_up = torch.where(low_value + high_value < 0, ~moves, moves)
    elif rounding is Rounding.ZERO:
        is_up = torch.where(low_value + high_value < 0, wide > low_value, wide == high_value)
    else:
        twice, ends = wide * 2, low_value + high_value
        is_up = (twice > ends) | ((twice == ends) & wins_up[high])
    q = torch.where(is_up, high_value, low_value)
    return q.masked_fill_(v.isnan(), math.nan).to(torch.float32)


@lru_cache(maxsize=64)
def _list_tables(
    element: Element, rounding: Rounding, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The values, float64, and whether a tie between each and the one below goes to it."""
    places = places_from_zero(element.values)
    wins = [False]
    for index in range(1, len(element.values)):
        low, high = element.values[index - 1 : index + 1]
        if rounding is Rounding.AWAY:
            wins.append(abs(high) >= abs(low))
        else:
            wins.append(places[index] % 2 == 0 or places[index - 1] % 2 == 1)
    values = torch.tensor(element.values, dtype=torch.float64, device=device)
    return values, torch.tensor(wins, dtype=torch.bool, device=device)


def places_from_zero(values: tuple[float, ...]) -> list[int]:
    """The place of each value of an ascending list, counted from zero outwards; that of zero is 0."""
    num_negative = sum(value < 0 for value in values)
    has_zero = 0.0 in values
    return [
        num_negative - index if value < 0 else index - num_negative + (not has_zero)
        for index, value in enumerate(values)
    ]
