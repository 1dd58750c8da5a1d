"""Whether rows of P are the softmax of rows of S, and rows of dS its derivative, in float64 with bounds.

    P = exp(S - max) / sum exp(S - max)        dS = P (dP - sum_j P_j dP_j)
    E = exp(S - m), l = sum exp(S - m)         dS = P (dP - sum_e dO_e o_e)       where a scheme says so

An implementation computes in float32 and rounds its results once to the working dtype. It keeps P for dS as it computed
it, or rounded to u of itself, which changes dS by at most u (|dS| + P sum_j P_j |dP_j|). An exponential of a number x
is then off by at most 2^-22 (1 + |x|) of itself, and so is a row's sum. Megatron hides a key by the score -10000, so
that rows whose visible scores are all near that are left out.

    # R rows of a tile, K keys
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantexp.formats.types import Delta, Softmax
from quantexp.proof.products import LAMBDA, unit
from quantexp.quant.sites import FPROP_P, Slot

_FLOAT32 = 2.0**-22
_LEAST_SCORE = -5000.0
_NONE = torch.empty(0, 0, dtype=torch.bool)


@dataclass
class Tile:
    """The chosen rows of a tile of S, and of the gradient of P; empty if they are not looked at."""

    #: Its first row.
    start: int
    S: Tensor = _NONE
    #: Where a key is hidden.
    hidden: Tensor = _NONE
    dP: Tensor | None = None
    #: delta of the rows, [R, 1], and the sum of the magnitudes in it, where it is not the sum of P dP.
    delta: tuple[Tensor, Tensor] | None = None
    #: The tensors that were P, one after another: the gradient of the last one is dP.
    num_watched: int = 0

    @cached_property
    def P(self) -> Tensor:  # noqa: N802
        """The softmax of S in float64; zero where a key is hidden."""
        return torch.softmax(self.visible, dim=1)

    @cached_property
    def visible(self) -> Tensor:
        """S in float64, and -inf where a key is hidden."""
        return self.S.double().masked_fill(self.hidden, -torch.inf)


def num_wrong_probabilities(P_RK: Tensor, tile: Tile) -> int:
    """How many elements are not the softmax of the scores."""
    visible, of_rounding, smallest = tile.visible, unit(P_RK.dtype) * 1.01, _smallest(P_RK.dtype)
    difference = (P_RK.double() - tile.P).abs_()
    if (difference <= tile.P * of_rounding + smallest).all():
        return 0  # as in most calls in 16 bits
    largest = visible.amax(dim=1, keepdim=True)
    reach = 1 + largest.abs() + (largest - visible).clamp_max(200.0)
    is_right = difference <= tile.P * (of_rounding + 2 * _FLOAT32 * reach) + smallest
    return int((~is_right & (largest > _LEAST_SCORE) & tile.P.isfinite()).sum())


def num_wrong_exponentials(E_RK: Tensor, l_R1: Tensor, tile: Tile, factor: float | None) -> int:
    """How many elements are not exp(S - m), and how many rows not their sum; `factor` is that of a repeated maximum."""
    visible = tile.visible
    largest = m = visible.amax(dim=1, keepdim=True)
    if factor is not None:
        is_repeated = (visible == largest).sum(dim=1, keepdim=True) > 1
        m = torch.where(is_repeated, (largest.float() * factor).double().clamp_min(0.0), largest)
    exponent = visible - m
    expected = exponent.exp()
    beside = expected * (1 + exponent.abs().clamp_max(200.0)) * 2 * _FLOAT32
    slack = expected * (unit(E_RK.dtype) * 1.01) + beside + _smallest(E_RK.dtype)
    counts = largest > _LEAST_SCORE
    wrong = ((E_RK.double() - expected).abs() > slack) & counts & expected.isfinite()
    sums, K = expected.sum(dim=1, keepdim=True), E_RK.shape[1]
    slack = beside.sum(dim=1, keepdim=True) + K * 2.0**-126
    slack += LAMBDA * 2.0**-24 * K**0.5 * sums
    wrong_sums = ((l_R1.double() - sums).abs() > slack) & counts & sums.isfinite()
    return int(wrong.sum() + wrong_sums.sum())


def declared_softmax(slot: Slot, settings: Sequence[Any]) -> Softmax:
    """What of attention's softmax a slot is, by its settings; the first that has an option decides."""
    if slot != FPROP_P:
        return Softmax()
    unnormalised, factor, delta = (
        next((v for each in settings if (v := getattr(each, name)) is not None), None)
        for name in ("unnormalised", "max_factor", "delta")
    )
    return Softmax(bool(unnormalised), factor if unnormalised else None, Delta(delta or "P"))


def num_wrong_gradients(dS_RK: Tensor, tile: Tile, kept: torch.dtype) -> int:
    """How many elements are not the derivative of the softmax, all if dP was not seen; P is kept for it in `kept`."""
    if tile.dP is None:
        return dS_RK.numel()
    P, dP = tile.P, tile.dP.double()
    delta, magnitudes = tile.delta or (
        (P * dP).sum(dim=1, keepdim=True),
        (P * dP.abs()).sum(dim=1, keepdim=True),
    )
    expected, beside = P * (dP - delta), P * magnitudes
    size = P * dP.abs() + beside
    slack = 1.01 * (unit(dS_RK.dtype) + unit(kept)) * expected.abs() + 64 * _FLOAT32 * size
    slack += 1.01 * unit(kept) * beside
    slack += _smallest(dS_RK.dtype) * (1 + dP.abs().amax(dim=1, keepdim=True))
    is_right = (dS_RK.double() - expected).abs() <= slack
    return 0 if is_right.all() else int((~is_right & expected.isfinite()).sum())


def _smallest(dtype: torch.dtype) -> float:
    """What rounding below a dtype's normal numbers changes, and flushing those of float32 to zero."""
    return torch.finfo(dtype).smallest_normal * unit(dtype) + 2.0**-126
