"""Decides whether something went wrong in the iteration that has just ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter

import numpy as np

from quantexp.capture.past import CONSISTENT, Past
from quantexp.extras.forensics.ring.store import Iteration, TensorKey
from quantexp.runs.dossiers import Trigger
from quantexp.runs.metrics import Metrics, is_fault
from quantexp.schema import TriggerConfig

#: The smallest robust standard deviation of a share.
_LEAST_SHARE = 0.005


@dataclass(frozen=True)
class Fired:
    """A trigger that fired, and why."""

    trigger: Trigger
    words: str
    #: How far out it was, in robust standard deviations.
    deviations: float = math.inf


class Triggers:
    """The triggers of a run; those of loss and gradient norm are the same on every rank."""

    def __init__(self, config: TriggerConfig) -> None:
        self.config = config
        self._past = {name: Past(config.window) for name in ("loss", "grad_norm")}

    def of_metrics(self, metrics: Metrics) -> Fired | None:
        """What a step's loss and gradient norm say; each joins the past afterwards."""
        fired = None
        if is_fault(asdict(metrics)):
            fired = Fired(Trigger.NONFINITE, metrics.nonfinite or "loss or gradient is not finite")
        for trigger, name in ((Trigger.LOSS, "loss"), (Trigger.GRAD_NORM, "grad_norm")):
            past, value = self._past[name], getattr(metrics, name)
            far = past.deviations(value)
            most = self.config.deviations
            if fired is None and far is not None and most is not None and far > most:
                fired = Fired(trigger, _spike(trigger, value, far, past.median), far)
            past.add(value)
        return fired

    def of_shares(self, iterations: Sequence[Iteration]) -> Fired | None:
        """What the last iteration of a rank's full ring says of saturated and underflowed values."""
        if self.config.share is None:
            return None
        for trigger, of, words in (
            (Trigger.SATURATED, attrgetter("saturated"), "values that saturate in {}"),
            (Trigger.UNDERFLOW, attrgetter("underflow"), "non-zero values of {} that become zero"),
        ):
            risen = _most_risen([of(iteration) for iteration in iterations], self.config)
            if risen is not None:
                what = words.format(risen.key)
                return Fired(
                    trigger,
                    f"the share of {what} is {risen.last:.1%}, the median of {len(iterations) - 1} "
                    f"iterations before {risen.median:.1%}",
                    risen.deviations,
                )
        return None


def _spike(trigger: Trigger, value: float, deviations: float, median: float) -> str:
    name = "loss" if trigger is Trigger.LOSS else "gradient norm"
    return (
        f"{name} {value:.4g} lies {deviations:.1f} robust deviations above its median {median:.4g}"
    )


@dataclass(frozen=True)
class _Risen:
    key: TensorKey
    last: float
    median: float
    deviations: float


def _most_risen(
    shares: Sequence[Mapping[TensorKey, float]], config: TriggerConfig
) -> _Risen | None:
    """The tensor whose last share lies farthest above its median before, of those that lie beyond both limits.

    Only tensors of every iteration count: an expert may have had no tokens.
    """
    *before, last = shares
    keys = [key for key in last if all(key in each for each in before)]
    if not keys or config.share is None:
        return None
    earlier = np.array([[each[key] for key in keys] for each in before])
    medians = np.median(earlier, axis=0)
    deviations = CONSISTENT * np.median(np.abs(earlier - medians), axis=0)
    rises = np.array([last[key] for key in keys]) - medians
    far = rises / np.maximum(deviations, _LEAST_SHARE)
    rises[(rises <= config.share) | (far <= (config.deviations or 0.0))] = 0.0
    index = int(rises.argmax())
    if rises[index] == 0.0:
        return None
    return _Risen(keys[index], last[keys[index]], float(medians[index]), float(far[index]))
