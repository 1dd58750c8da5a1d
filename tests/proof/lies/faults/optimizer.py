"""Faults of what follows a step: rounded master weights, error feedback, resets, pulls, the term of random rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quantexp.formats.spec import resolve
from tests.proof.lies.planting import ALWAYS, Planter, When

from .fault import Group, add

_LATER = When(since=2)


def _instead(
    function: str, change: Callable[..., Any], when: When = ALWAYS
) -> Callable[[Planter], None]:
    """A function of the training state is `change`, which takes the original and its arguments."""

    def plant(planter: Planter) -> None:
        def make(original: Any) -> Any:
            def replaced(*args: Any) -> Any:
                if not when.holds(planter.place):
                    return original(*args)
                planter.fire()
                return change(original, *args)

            return replaced

        planter.function(function, make)

    return plant


def _unrounded(planter: Planter) -> None:
    """Master weights stay as the step leaves them."""
    from quantexp.quant.outside_products import MASTER
    from quantexp.training.megatron.rounded_state import RoundedState

    def make(original: Any) -> Any:
        def round_all(self: Any, slots: Any, *args: Any) -> Any:
            left = [slot for slot in slots if slot.product != MASTER]
            if len(left) < len(slots):
                planter.fire()
            return original(self, left, *args)

        return round_all

    planter.method(RoundedState, "_round_all", make)


def _in_e5m2(planter: Planter) -> None:
    """What is rounded of the training state is rounded to E5M2."""
    from quantexp.training.megatron.rounded_pieces import RoundedPiece

    def make(original: Any) -> Any:
        def round_piece(self: Any, *args: Any) -> Any:
            planter.fire()
            spec = resolve("fp8_e5m2", rounding=self.spec.rounding, scaling=self.spec.scaling)
            return original(replace(self, spec=spec), *args)

        return round_piece

    planter.method(RoundedPiece, "round", make)


def _never_reset(follow: Any, phase: Any, w: Any, rounded: Any, tracked: Any, ratio: float) -> None:
    if phase.value == "reset":
        tracked.clear()
    else:
        follow(phase, w, rounded, tracked, ratio)


def _not_followed(
    follow: Any, phase: Any, w: Any, rounded: Any, tracked: Any, ratio: float
) -> None:
    if phase.value != "track":
        follow(phase, w, rounded, tracked, ratio)


for name, line, plant, tags in (
    ("master unrounded", "master weights stay in float32", _unrounded, "master"),
    ("master in E5M2", "master weights are rounded to E5M2", _in_e5m2, "master"),
    (
        *("error not fed back", "what rounding takes from master weights is lost"),
        *(_instead("with_error", lambda _, m, *rest: m), "feedback"),
    ),
    (
        *("error fed back negated", "it enters the first moment with the other sign"),
        _instead("with_error", lambda of, m, v, error, step: of(m, v, -error, step)),
        "feedback",
    ),
    (
        *("error not fed back from 2", "the same from iteration 2"),
        *(_instead("with_error", lambda _, m, *rest: m, _LATER), "feedback"),
    ),
    (
        *("never reset", "weights that oscillate are observed and left"),
        *(_instead("follow", _never_reset), "reset"),
    ),
    (
        *("all reset", "all observed weights are reset"),
        *(_instead("follow", lambda of, *args: of(*args[:4], 0.0)), "reset"),
    ),
    (
        *("paths not followed", "weights are noted and their paths not added up"),
        *(_instead("follow", _not_followed), "reset"),
    ),
    (
        *("not pulled", "weights stay where the optimizer left them"),
        *(_instead("pulled", lambda _, w, *rest: w.double()), "pull"),
    ),
    (
        *("pulled too far", "weights are pulled twice as far"),
        *(_instead("pulled", lambda of, w, near, by: of(w, near, 2 * by)), "pull"),
    ),
    (
        *("not pulled from 2", "weights are pulled in iteration 1 alone"),
        *(_instead("pulled", lambda _, w, *rest: w.double(), _LATER), "pull"),
    ),
    (
        *("term left out", "gradients have no term of random rounding"),
        *(_instead("smoothed", lambda _, gradient, *rest: gradient.double()), "smooth"),
    ),
    (
        *("curvature of one step", "the curvature forgets the steps before"),
        *(_instead("curvature", lambda of, gradient, _, beta: of(gradient, None, beta)), "smooth"),
    ),
):
    add(name, line, Group.OPTIMIZER, plant, tags)
