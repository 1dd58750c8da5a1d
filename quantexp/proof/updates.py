"""Whether the optimizer moves weights as it is configured to, in float64, in a few elements of a parameter.

    g = main gradient / loss scale * min(1, clip / (norm + 10^-6))
    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)

The rate, the decay, betas and eps are computed from the configuration, t is counted by the watcher. Torch and fused
kernels compute in float32, in orders of their own; each line is compared with what the line before it left. Of a matrix
that Muon moves the momentum alone is compared, b = mu b + (1 - mu) g.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from quantexp.proof.master_weights import AdamStep, num_beyond, num_not_stepped_of
from quantexp.schema import LrSchedule, TrainingConfig

#: Megatron-Core adds this to the norm by which it divides (`clip_grad_by_total_norm_fp32`).
_EPS_OF_NORM = 1e-6
#: Half units in the last place of float32 of the larger term: a product or two, a difference, a sum, and the factor.
_SLACK = 16 * 2.0**-24
#: What is below float32's normal numbers may be zero.
_TINY = 2.0**-126
#: Of the norm, which may be added up in float32.
_OF_NORM = 2.0**-16
#: The largest number of float32.
_LARGEST = float(np.finfo(np.float32).max)
#: Of the largest rate: some ten operations in float64, in another order.
_OF_RATE = 2.0**-40

#: What an iteration used, by the names of metrics.jsonl.
Used: TypeAlias = Mapping[str, float | None]


@dataclass(frozen=True)
class Held:
    """Some elements of a parameter as the optimizer holds them, float64 vectors: the weights and its moments."""

    weights: np.ndarray
    moments: Sequence[np.ndarray]


def rate(training: TrainingConfig, step: int) -> float:
    """The learning rate of a step, counted from 1 and without those that were left out."""
    warmup, last = training.warmup_iterations, training.iterations
    if step <= warmup:
        return training.lr * step / warmup
    if training.lr_schedule is LrSchedule.constant:
        return training.lr
    if step > last:
        return training.min_lr
    begin = warmup
    if training.lr_schedule is LrSchedule.wsd:
        begin = last - (training.decay_iterations or 0)
    part = max(0, step - begin) / (last - begin) if last > begin else 0.0
    is_cosine = training.lr_schedule is LrSchedule.cosine
    kept = (1 + math.cos(math.pi * part)) / 2 if is_cosine else 1 - part
    return training.min_lr + kept * (training.lr - training.min_lr)


def clipped(gradient: np.ndarray, training: TrainingConfig, norm: float) -> np.ndarray:
    """The gradient after it is clipped by its norm."""
    if not training.clip_grad:
        return gradient
    return gradient * min(1.0, training.clip_grad / (norm + _EPS_OF_NORM))


def wrong_step(
    before: Held, after: Held, gradient: np.ndarray, betas: Sequence[float], step: AdamStep | None
) -> str:
    """What is wrong with a step, in words; nothing if it is right.

    Args:
        before: what the step found.
        after: what it left; as many moments.
        gradient: what it was given, clipped.
        betas: of the moments: of the gradient, and of its square.
        step: the numbers of AdamW; None if the weights are moved in another way and are not compared.
    """
    given = gradient
    for name, beta, old, new in zip(
        ("first", "second"), betas, before.moments, after.moments, strict=False
    ):
        expected = beta * old + (1 - beta) * given
        slack = _SLACK * (abs(old) + (1 - beta) * abs(given)) + 2 * _TINY
        if number := num_beyond(new, expected, slack, abs(old) + abs(given)):
            words = "are not those of its gradient and of the step before"
            return f"{number} of {len(given)} drawn elements of its {name} moment {words}"
        given = gradient * gradient
    if step is not None:
        moments = after.moments[0], after.moments[1]
        if number := num_not_stepped_of(before.weights, after.weights, *moments, step):
            return f"{number} of {len(given)} drawn weights are not those of AdamW's step"
    return ""


def wrong_norm(norm: float, own: float) -> str:
    """What is wrong with the norm of the gradient, in words; nothing if it is right, or no finite number."""
    if not math.isfinite(own) or abs(norm - own) <= _OF_NORM * own + _TINY:
        return ""
    return f"the norm of the gradient is {own:.6g}, and {norm:.6g} was taken for it"


def wrong_omission(norm: float, own: float) -> str:
    """What is wrong with a step that is left out for a norm that is not finite, in words.

    Nothing if the norm of the gradient is not: NaN, Inf, or too large for float32, in which it is taken.
    """
    if not own * (1 + _OF_NORM) < _LARGEST:
        return ""
    return f"the step was left out for a norm of {norm:g}, and that of the gradient is {own:.6g}"


def wrong_line(line: Mapping[str, object], used: Used, largest_rate: float) -> str:
    """What is wrong with a line of metrics.jsonl, in words; None in it is a number that is not finite, or none.

    `used` has the learning rate as it must be, and all else as it was; what it has not is not compared.
    """
    for name, value in used.items():
        expected = value if value is not None and math.isfinite(value) else None
        own, slack = line.get(name), largest_rate * _OF_RATE if name == "lr" else 0.0
        if own == expected:
            continue
        if not (isinstance(own, float) and expected is not None and abs(own - expected) <= slack):
            return f"{name} in metrics.jsonl is {own}, and the iteration had {expected}"
    return ""
