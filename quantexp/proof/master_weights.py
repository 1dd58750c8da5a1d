"""What becomes of master weights that a scheme rounds, after a step of AdamW.

In numpy, by none of the code that trains. A weight is that of AdamW up to rounding: torch computes it in float32, in an
order of its own. All else is exact, because its operations are IEEE's: the first moment after error feedback in
float64, the paths of weights that may oscillate in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantexp.quant.outside_products import PULL, RESET, StateSlot, weight_slots
from quantexp.schema import QuantConfig

#: Half units in the last place of float32, of the larger one of the weight and its change, that a step may be off. It
#: has some ten roundings: lr, eps, both bias corrections, the root, three products, a quotient and the difference.
_HALF_UNITS = 16
_HALF_UNIT = 2.0**-24
_AT_ONCE = 1 << 20
#: The largest number of float32.
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one step of AdamW, `steps` of them with it."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    steps: int


def num_not_stepped(before: Tensor, after: Tensor, m: Tensor, v: Tensor, step: AdamStep) -> int:
    """Weights that are not what a step with these moments makes of those before it; vectors of float32.

    `after` is before it is rounded.
    """
    number = 0
    for part in _in_parts(before, after, m, v):
        of_w, of_after, of_m, of_v = map(_float64, part)
        number += num_not_stepped_of(of_w, of_after, of_m, of_v, step)
    return number


def num_not_stepped_of(
    w: np.ndarray, after: np.ndarray, m: np.ndarray, v: np.ndarray, step: AdamStep
) -> int:
    """The same for float64 arrays."""
    change = m / (1 - step.beta1**step.steps) / _root(v, step)
    change = step.lr * (change + step.weight_decay * w)
    most = _HALF_UNITS * _HALF_UNIT * np.maximum(abs(w), abs(change))
    return num_beyond(after, w - change, most, abs(w) + abs(change))


def num_beyond(own: np.ndarray, expected: np.ndarray, slack: np.ndarray, terms: np.ndarray) -> int:
    """How many elements differ by more than their slack, or are no finite numbers.

    Not where the sum of the magnitudes that were added up is none of float32 either.
    """
    is_known = terms + slack < _LARGEST
    return int((is_known & ~(abs(own - expected) <= slack)).sum())


def with_error(m: Tensor, v: Tensor, error: Tensor, step: AdamStep) -> np.ndarray:
    """The first moment after the error of a weight's rounding is added (ECO, arXiv 2601.22101, algorithm 3), float32.

    `error` is float64. At a rate of 0 nothing is added.
    """
    if not step.lr:
        return m.detach().cpu().numpy()
    factor = (1 - step.beta1**step.steps) / step.lr * (1 - 1 / step.beta1)
    root = _root(_float64(v), step)
    added: np.ndarray = (_float64(m) + root * _float64(error) * factor).astype(np.float32)
    return added


def follows(slot: StateSlot, iteration: int, iterations: int) -> str:
    """What must follow a step of an iteration, of so many of the schedule.

    `pull`; `note`, `track` or `reset` of weights that may oscillate; or nothing.
    """
    options = dict(slot.options)
    if slot.product not in (PULL, RESET) or iteration <= options["start"] * iterations:
        return ""
    if slot.product == PULL:
        return PULL
    every, over = options["every"], options["over"]
    first = iteration // every * every  # of its period
    return {0: "note", over + 1: "reset"}.get(
        iteration - first, "track" if iteration - first <= over else ""
    )


def first_change(slot: StateSlot, iterations: int) -> int | None:
    """The first iteration that pulls or resets weights, or None if the schedule ends before."""
    options = dict(slot.options)
    if slot.product == PULL:
        return int(options["start"] * iterations) + 1
    every, begin = int(options["every"]), int(options["start"] * iterations)
    first = (begin // every + 1) * every + int(options["over"]) + 1
    return first if first <= iterations else None


def proved_again(quant: QuantConfig, iterations: int) -> set[int]:
    """The iterations that are proved completely because weights are pulled or reset in them for the first time."""
    slots = (slot for slot in weight_slots(quant) if slot.product in (PULL, RESET))
    return {first for slot in slots if (first := first_change(slot, iterations)) is not None}


def tracked_after(
    what: str, w: Tensor, rounded: Tensor, tracked: Mapping[str, Tensor]
) -> list[np.ndarray]:
    """What is tracked after a `note` or `track`: weights, rounded ones, and the paths of both, float32."""
    own, image = _float32(w), _float32(rounded)
    if what == "note":
        return [own, image, np.zeros_like(own), np.zeros_like(own)]
    last, last_image, path, image_path = map(_float32, tracked.values())
    return [own, image, path + abs(own - last), image_path + abs(image - last_image)]


def after_reset(
    w: Tensor, rounded: Tensor, tracked: Mapping[str, Tensor], ratio: float
) -> np.ndarray:
    """The weights of which those that oscillated have their rounded value, float32."""
    _, _, path, image_path = map(_float32, tracked.values())
    moved = path > 0
    far = np.zeros_like(moved)
    far[moved] = image_path[moved] / path[moved] >= np.float32(ratio)
    return np.where(far, _float32(rounded), _float32(w))


def after_pull(
    w: Tensor, rounded: Tensor, slot: StateSlot, when: tuple[int, int], rate: float
) -> np.ndarray:
    """The weights that are pulled towards their rounded values, float32; in an iteration of so many."""
    options, (iteration, iterations) = dict(slot.options), when
    begin = options["start"] * iterations
    factor = rate * (options["strength"] * (iteration - begin) / (iterations - begin))
    parts = ((_float64(x), _float64(image)) for x, image in _in_parts(w, rounded))
    return np.concatenate([(x - (x - image) * factor).astype(np.float32) for x, image in parts])


def smoothed(
    gradient: Tensor, last: Tensor | None, slopes: Tensor, strength: float, beta: float
) -> tuple[np.ndarray, np.ndarray]:
    """The curvature of each weight, and the gradient with the term of the noise, float32.

    `last` is the curvature of the step before, None in the first.
    """
    now, later = [], []
    for g32, s32, c32 in _in_parts(gradient, slopes, gradient if last is None else last):
        g = _float64(g32)
        square = g * g if last is None else g * g * (1 - beta) + _float64(c32) * beta
        now.append(square.astype(np.float32))
        later.append(now[-1].astype(np.float64) * (strength / 2) * _float64(s32) + g)
    return np.concatenate(now), np.concatenate(later).astype(np.float32)


def _in_parts(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of vectors of which few float64 copies are small."""
    return zip(*(torch.split(x, _AT_ONCE) for x in vectors), strict=True)


def _float32(x: Tensor) -> np.ndarray:
    values: np.ndarray = x.detach().cpu().to(torch.float32).numpy()
    return values


def _root(v: np.ndarray, step: AdamStep) -> np.ndarray:
    """What Adam divides the corrected first moment by."""
    with np.errstate(invalid="ignore"):
        root: np.ndarray = np.sqrt(v / (1 - step.beta2**step.steps)) + step.eps
    return root


def _float64(x: Tensor) -> np.ndarray:
    values: np.ndarray = x.detach().cpu().double().numpy()
    return values
