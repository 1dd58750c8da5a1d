"""The table of `quantexp bisect --gradient`: how far each part of a scheme moves the gradient from that in bf16."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from quantexp.runs.gradients import ALONE, SCHEME, WITHOUT, Distance, Gradients, Pass
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table

#: Units that are listed; the figure has all.
_MOST_LISTED = 24
_COLUMNS = (
    Column("quantised", shrink=Shrink.WRAP),
    Column("alone", is_number=True),
    Column("cosine", is_number=True, worth=4),
    Column("most in", worth=3),
    Column("left out", is_number=True),
    Column("of the scheme's", is_number=True, worth=5),
)


def print_gradients(scheme: str, gradients: Gradients, console: Console) -> None:
    """Print a row for the scheme and one for each unit, the largest distance alone first."""
    groups, passes = gradients["groups"], gradients["passes"]
    whole = scheme_of(passes)
    units = by_unit(passes)
    ordered = sorted(units, key=lambda unit: -_size(units[unit][0]["whole"]["distance"]))
    rows = [
        [f"[bold]{escape(scheme)}[/]", *_alone(whole, groups), "-", "-"],
        *(
            [
                escape(unit),
                *_alone(units[unit][0], groups),
                _number(units[unit][1]["whole"]["distance"]),
                share_words(units[unit][1]["whole"], whole["whole"]),
            ]
            for unit in ordered[:_MOST_LISTED]
        ),
    ]
    title = f"gradient of iteration {gradients['iteration']} against bf16"
    console.print(fitted_table(_COLUMNS, rows, console.width, title).table)
    if left_out := max(0, len(ordered) - _MOST_LISTED):
        console.print(f"and {left_out} more, in the figure", style="dim italic")
    notes = [
        "alone: |g - b| / |b| over all parameters, g with this part quantised and b in bf16, same weights and tokens",
        "left out: the same with everything but this part quantised, and its share of the whole scheme's distance",
    ]
    for note in notes if units else notes[:1]:
        console.print(note, style="dim italic")


def scheme_of(passes: Sequence[Pass]) -> Pass:
    """The pass of the whole scheme."""
    return next(one for one in passes if one["kind"] == SCHEME)


def by_unit(passes: Sequence[Pass]) -> dict[str, tuple[Pass, Pass]]:
    """Unit -> its pass alone, and the pass without it, in the order of the map."""
    kinds: dict[str, dict[str, Pass]] = {ALONE: {}, WITHOUT: {}}
    for one in passes:
        if one["kind"] in kinds:
            kinds[one["kind"]][str(one["unit"])] = one
    return {unit: (alone, kinds[WITHOUT][unit]) for unit, alone in kinds[ALONE].items()}


def share_words(left: Distance, whole: Distance) -> str:
    """The distance without a unit as a share of the scheme's: `62%`."""
    if left["distance"] is None or not whole["distance"]:
        return "-"
    return f"{left['distance'] / whole['distance']:.0%}"


def _alone(one: Pass, groups: Sequence[str]) -> list[str]:
    sizes = [_size(each["distance"]) for each in one["groups"]]
    most = groups[max(range(len(sizes)), key=sizes.__getitem__)] if any(sizes) else "-"
    cosine = one["whole"]["cosine"]
    return [
        _number(one["whole"]["distance"]),
        "not finite" if cosine is None else f"{cosine:.6f}",
        most,
    ]


def _size(distance: float | None) -> float:
    """A distance to sort by: one that is not finite is the largest."""
    return math.inf if distance is None else distance


def _number(distance: float | None) -> str:
    return "not finite" if distance is None else f"{distance:.4f}"
