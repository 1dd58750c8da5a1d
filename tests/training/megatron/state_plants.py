"""What the ranks of `test_state_in_layouts` train without, or with."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from typing import Any
from unittest import mock

from quantexp.training.megatron.finite import chained
from quantexp.training.megatron.state_shards import RankState, _mains
from quantexp.training.megatron.step import Stepper


def left_out(optimizer: Any, *_: object) -> tuple[bool, float]:
    """In the place of `step_if_finite`: a main gradient becomes NaN, and the step is left out."""
    parameter: Any = next(iter(_mains(chained(optimizer)[0])))[0]
    parameter.main_grad.fill_(math.nan)
    return False, math.nan


@contextlib.contextmanager
def no_step() -> Iterator[None]:
    """Every step is left out, so that a checkpoint holds what was loaded."""
    target = "quantexp.training.megatron.watched_step.step_if_finite"
    with mock.patch(target, left_out):
        yield


@contextlib.contextmanager
def no_room_on_rank_1() -> Iterator[None]:
    """No file of rank 1 may become larger than 10 kB; Python ignores the signal, so a write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def nan_on_rank_1() -> Iterator[None]:
    """A moment on rank 1 is NaN after the last step before a checkpoint."""
    plain = Stepper.state

    def state(stepper: Stepper) -> RankState:
        content = plain(stepper)
        if os.environ["RANK"] == "1":
            dict(content.named_tensors())[NAN].view(-1)[5] = math.nan
        return content

    with mock.patch.object(Stepper, "state", state):
        yield


NAN = "exp_avg_sq/decoder.layers.1.mlp.linear_fc2.weight"
