"""Whether Muon moves a matrix along its momentum, orthogonalised: each published matrix by itself.

    u = (1 - mu) g + mu b        w = w - lr wd w - lr 0.2 sqrt(max(rows, columns)) NS(u)

b is the momentum after the step. NS is Jordan's iteration in bf16 (Jordan et al. 2024), whose products are computed in
float64 here and rounded where bf16 rounds them. An implementation adds in float32, so a few results are rounded to the
other side, and five iterations enlarge that by 3.4445^5 = 485 at most, where singular values are smallest. The norm of
the difference is bounded by `_APART`; its part along the matrix, an average over all elements, is much smaller
(`_LONGER`).

    # R rows, C columns
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_COEFFICIENTS, _STEPS, _EPS, _RMS = (3.4445, -4.7750, 2.0315), 5, 1e-7, 0.2
#: Of the norm of the orthogonalised matrix. Of 408 matrices of 8 to 1,024 rows, random, of low rank or with singular
#: values from 1 to 1e-4, the farthest was 0.034 apart, and 0.0013 longer (torch 2.13 on a CPU).
_APART, _LONGER = 0.125, 0.01
#: Of the part of the difference along the weights, where decay shows: of the norm, over the root of the elements. In a
#: direction that the difference does not depend on it was at most 0.024.
_ALONG = 0.25


def orthogonalised(u_RC: Tensor) -> Tensor:
    """Five steps of Jordan's iteration, float64 with the values of bf16."""
    x = _rounded(u_RC.double())
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = _rounded(x / _rounded(torch.linalg.vector_norm(x)).clamp(min=_EPS))
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = _rounded(x @ x.T)
        x = _rounded(a * x + _rounded(b * gram + c * (gram @ gram)) @ x)
    return x.T if is_tall else x


def wrong_direction(
    before: Tensor,
    after: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    beta: float,
    numbers: tuple[float, float],
    matrices: Iterable[Sequence[int]],
) -> str:
    """What is wrong with the step of a matrix, in words; nothing if it is right, or none.

    Args:
        before: the weights before the step, [R, C] in float32.
        after: the weights after it.
        gradient: what the optimizer was given, clipped.
        momentum: after the step.
        beta: of the momentum.
        numbers: the rate and the decay.
        matrices: the rows of each published matrix.
    """
    lr, decay = numbers
    if not lr:
        return ""
    moved = before.double() * (1 - lr * decay) - after.double()
    u = (1 - beta) * gradient.double() + beta * momentum.double()
    for rows in matrices:
        expected = orthogonalised(u[rows]) * (lr * _RMS * math.sqrt(max(len(rows), u.shape[1])))
        norm = float(torch.linalg.vector_norm(expected))
        if not math.isfinite(norm) or not norm:
            continue
        off = (moved[rows] - expected) / norm
        apart = float(torch.linalg.vector_norm(off))
        longer = abs(float((off * expected).sum())) / norm
        w = before[rows].double()
        length = float(torch.linalg.vector_norm(w))
        along = abs(float((off * w).sum())) / max(length, _EPS)
        # w is rounded to float32 twice, which may add up to a multiple of it.
        rounded = 2.0**-23 * length / norm
        bounds = _APART, _LONGER, _ALONG / math.sqrt(w.numel())
        if not all(x <= b + rounded for x, b in zip((apart, longer, along), bounds, strict=True)):
            return "its weights are not moved along its momentum, orthogonalised, as Muon does"
    return ""


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()
