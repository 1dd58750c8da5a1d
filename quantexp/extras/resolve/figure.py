"""The figure of `quantexp branch`: the effect of each scheme by horizon, with the band of its 95% interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from quantexp.analysis.scheme_style import SchemeStyle, scheme_styles
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


def draw_outcome(outcome: Outcome, folder: Path) -> list[Path]:
    """Draw `branch.png` and `branch.pdf`; nothing without a unit. Controls are grey, beside the first measure."""
    panels = {each: _lines(outcome.schemes[each]) for each in Measure}
    if not any(panels.values()):
        return []
    figure = new_figure(_WIDTH_INCH, _HEIGHT_INCH)
    axes = figure.subplots(1, len(panels), sharey=False)
    figure.subplots_adjust(left=0.08, right=0.87, top=0.88, bottom=0.2, wspace=0.62)
    for ax, (measure, lines) in zip(axes, panels.items(), strict=True):
        controls = _lines(outcome.controls) if measure is Measure.WORKING else {}
        _draw(ax, lines, controls, outcome)
        label = f"above {outcome.design.against}, {UNIT:g} nats a token"
        dress(ax, f"Loss {TITLES[measure]}", "steps of the branch", label)
    _name(axes, panels, outcome)
    note = (
        f"bands: 95% over {len(outcome.design.bases)} seeds; dotted: the margin of equivalence; "
        "numbers at different horizons are no sizes to compare"
    )
    figure.text(0.01, 0.02, note, fontsize=NOTE_PT, color=INK)
    return save_figure(figure, folder / FILE_NAME, ("png", "pdf"))


#: Scheme -> its judgements in the order of the horizons.
_Lines = dict[str, list[Judgement]]


def _lines(judgements: Sequence[Judgement]) -> _Lines:
    """The lines that have a mean at a horizon."""
    lines: _Lines = {}
    for each in judgements:
        if each.mean is not None:
            lines.setdefault(each.scheme, []).append(each)
    return lines


def _draw(ax: Axes, lines: _Lines, controls: _Lines, outcome: Outcome) -> None:
    ax.axhline(0, color=GREY, linewidth=1.2)
    for side in (-1, 1):
        ax.axhline(side * outcome.margin / UNIT, color=GREY, linewidth=0.8, linestyle=":")
    for judgements in controls.values():
        _line(ax, judgements, SchemeStyle(GREY, (2.0, 2.0), ""))
    for style, judgements in zip(scheme_styles(list(lines)), lines.values(), strict=True):
        _line(ax, judgements, style)
    ax.set_xticks(outcome.design.steps)


def _line(ax: Axes, judgements: Sequence[Judgement], style: SchemeStyle) -> None:
    steps = [each.steps for each in judgements]
    means = [(each.mean or 0.0) / UNIT for each in judgements]
    ax.plot(
        steps,
        means,
        color=style.colour,
        linestyle=style.linestyle,
        marker=style.marker or None,
        markersize=4,
        linewidth=1.6,
    )
    bands = [each.interval or (each.mean or 0.0,) * 2 for each in judgements]
    low, high = ([value / UNIT for value in side] for side in zip(*bands, strict=True))
    ax.fill_between(steps, low, high, color=style.colour, alpha=0.18, linewidth=0)


def _name(axes: Sequence[Axes], panels: dict[Measure, _Lines], outcome: Outcome) -> None:
    """Write the name of each line at its end."""
    for ax, (measure, lines) in zip(axes, panels.items(), strict=True):
        styles = scheme_styles(list(lines))
        ends = [
            (float(own[-1].steps), (own[-1].mean or 0.0) / UNIT, name, style)
            for (name, own), style in zip(lines.items(), styles, strict=True)
        ]
        if measure is Measure.WORKING:
            grey = SchemeStyle(GREY, (2.0, 2.0), "")
            ends += [
                (float(own[-1].steps), (own[-1].mean or 0.0) / UNIT, name, grey)
                for name, own in _lines(outcome.controls).items()
            ]
        name_lines(ax, ends)
