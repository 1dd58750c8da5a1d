"""Resets of weights that oscillate between two values of a format (OsciReset of TetraJet-v2, arXiv 2510.27527).

After every iteration that `every` divides, the weights w are noted. In the next `over` iterations two paths are added
up, of a weight and of its rounded value:

    path += |w - w'|      rounded path += |round(w) - round(w')|      w' of the iteration before

A weight that goes back and forth over a threshold moves little, and its rounded value much. One iteration later those
whose rounded path is at least `ratio` times their path become round(w), the middle of what is rounded to it. So does
the authors' code (thu-ml/TetraJet-v2-NVFP4Training, `oscillation_reset.py`), which begins at a share of the training.
Adam's moments stay. All of it is elementwise in float32, so that it does not depend on the layout.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from quantexp.model.training_state import KEPT
from quantexp.quant.outside_products import RESET, StateSlot

_W, _ROUNDED, _PATH, _ROUNDED_PATH = KEPT[RESET]


class Phase(Enum):
    """What follows a step."""

    NOTE = "note"
    TRACK = "track"
    RESET = "reset"


def phase_of(slot: StateSlot, iteration: int, iterations: int) -> Phase | None:
    """What follows the step of an iteration, of so many that the schedule has; None: nothing."""
    options = dict(slot.options)
    place = iteration % int(options["every"])
    if iteration <= options["start"] * iterations or place > options["over"] + 1:
        return None
    return Phase.NOTE if not place else Phase.TRACK if place <= options["over"] else Phase.RESET


def follow(
    phase: Phase, w: Tensor, rounded: Tensor, tracked: dict[str, Tensor], ratio: float
) -> None:
    """Do what follows a step, in place.

    Args:
        phase: what it is. Without a noted weight there is nothing to track or reset.
        w: main weights, flat.
        rounded: what the format leaves of them.
        tracked: of these weights; empty outside of an observation.
        ratio: of the paths.
    """
    if phase is Phase.NOTE:
        zeros = (torch.zeros_like(w) for _ in range(2))
        tracked |= dict(zip(KEPT[RESET], (w.clone(), rounded, *zeros), strict=True))
    elif not tracked:
        return
    elif phase is Phase.TRACK:
        tracked[_PATH] += (w - tracked[_W]).abs_()
        tracked[_ROUNDED_PATH] += (rounded - tracked[_ROUNDED]).abs_()
        tracked[_W].copy_(w)
        tracked[_ROUNDED] = rounded
    else:
        far = tracked[_ROUNDED_PATH] / tracked[_PATH] >= ratio
        w.copy_(torch.where(far & (tracked[_PATH] > 0), rounded, w))
        tracked.clear()
