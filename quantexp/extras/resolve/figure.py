"""The figure of `quantexp branch`: the effect of each scheme by horizon, with the band of its 95% interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from quantexp.analysis.scheme_style import DOTTED, Dash, SchemeStyle, scheme_styles
from quantexp.analysis.style import (
    GREY,
    INK,
    NOTE_PT,
    dress,
    name_lines,
    new_figure,
    save_figure,
)
from quantexp.extras.resolve.judging import Judgement
from quantexp.extras.resolve.outcome import Measure, Outcome
from quantexp.extras.resolve.table import TITLES, UNIT

FILE_NAME = "branch"
_WIDTH_INCH, _HEIGHT_INCH = 10.5, 4.2


#: A scheme or control, its judgements in the order of the horizons, and its style.
_Line = tuple[str, list[Judgement], SchemeStyle]


def draw_outcome(outcome: Outcome, folder: Path) -> list[Path]:
    """Draw `branch.png` and `branch.pdf`; nothing without a unit. Controls are dotted, beside the first measure."""
    panels = {measure: _lines(outcome.schemes[measure]) for measure in Measure}
    if not any(panels.values()):
        return []
    panels[Measure.WORKING] += _lines(outcome.controls, DOTTED)
    figure = new_figure(_WIDTH_INCH, _HEIGHT_INCH)
    axes = figure.subplots(1, len(panels))
    figure.subplots_adjust(left=0.08, right=0.87, top=0.88, bottom=0.2, wspace=0.62)
    for ax, (measure, lines) in zip(axes, panels.items(), strict=True):
        _draw(ax, lines, outcome)
        label = f"above {outcome.design.against}, {UNIT:g} nats a token"
        dress(ax, f"Loss {TITLES[measure]}", "steps of the branch", label)
        name_lines(ax, [(own[-1].steps, _mean(own[-1]), name, style) for name, own, style in lines])
    note = (
        f"bands: 95% intervals over {len(outcome.design.bases)} seeds; grey dots: the margin of equivalence; "
        "the sizes of differences at different horizons cannot be compared"
    )
    figure.text(0.01, 0.02, note, fontsize=NOTE_PT, color=INK)
    return save_figure(figure, folder / FILE_NAME, ("png", "pdf"))


def _lines(judgements: Sequence[Judgement], dash: Dash | None = None) -> list[_Line]:
    """The lines that have a mean at a horizon; with a dash, in the colours of their schemes, without markers."""
    lines: dict[str, list[Judgement]] = {}
    for each in judgements:
        if each.mean is not None:
            lines.setdefault(each.scheme, []).append(each)
    styles = scheme_styles([name.partition(" ")[0] for name in lines])
    if dash is not None:
        styles = [replace(style, dash=dash, marker="") for style in styles]
    return [(name, own, style) for (name, own), style in zip(lines.items(), styles, strict=True)]


def _mean(each: Judgement) -> float:
    """Of a judgement that has one, in units of the figure."""
    return (each.mean or 0.0) / UNIT


def _draw(ax: Axes, lines: Sequence[_Line], outcome: Outcome) -> None:
    ax.axhline(0, color=GREY, linewidth=1.2)
    for side in (-1, 1):
        ax.axhline(side * outcome.margin / UNIT, color=GREY, linewidth=0.8, linestyle=":")
    for _, own, style in lines:
        steps = [each.steps for each in own]
        look: dict[str, Any] = {
            "color": style.colour,
            "linestyle": style.linestyle,
            "linewidth": 1.6,
        }
        ax.plot(steps, list(map(_mean, own)), marker=style.marker, markersize=4, **look)
        intervals = [each.interval or (each.mean or 0.0,) * 2 for each in own]
        low, high = ([bound / UNIT for bound in side] for side in zip(*intervals, strict=True))
        ax.fill_between(steps, low, high, color=style.colour, alpha=0.15, linewidth=0)
    ax.set_xticks(outcome.design.steps)
