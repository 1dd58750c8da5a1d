"""The figure of `quantexp gradient`: error and bias of each scheme and its parts, and the error by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from quantexp.analysis.scheme_style import SchemeStyle, scheme_styles
from quantexp.analysis.style import (
    INK,
    NOTE_PT,
    TICK_PT,
    dress,
    name_lines,
    new_figure,
    save_figure,
)
from quantexp.extras.resolve.gradient.outcome import Measure, Outcome, Row
from quantexp.extras.resolve.gradient.results import RAW, WHOLE
from quantexp.extras.resolve.gradient.table import TITLES
from quantexp.terminal.escaping import printable

FILE_NAME = "gradient"
_ROW_INCH, _TOP_INCH, _BOTTOM_INCH, _WIDTH_INCH = 0.24, 0.5, 0.9, 13.0


def draw_outcome(outcome: Outcome, folder: Path) -> list[Path]:
    """Draw `gradient.png` and `gradient.pdf`; nothing without a unit."""
    rows = {scaling: own for scaling, own in outcome.rows.items() if own}
    if not rows:
        return []
    most = max(map(len, rows.values()))
    height = max(3.2, _TOP_INCH + _BOTTOM_INCH + _ROW_INCH * most)
    figure = new_figure(_WIDTH_INCH, height)
    axes = figure.subplots(1, len(rows) + 1, squeeze=False)[0]
    bottom, top = _BOTTOM_INCH / height, 1 - _TOP_INCH / height
    figure.subplots_adjust(left=0.15, right=0.84, top=top, bottom=bottom, wspace=0.25)
    styles = _styles(rows[RAW])
    for ax, (scaling, own) in zip(axes, rows.items(), strict=False):
        _draw_rows(ax, own, styles)
        dress(ax, f"Error, {TITLES[scaling]}", "relative to the gradient in fp32", "", grid="x")
        if ax is not axes[0]:
            ax.set_yticklabels([])
    _draw_layers(axes[-1], outcome, rows[RAW], styles)
    note = (
        f"95% intervals over {len(outcome.design.bases)} seeds; hollow: the root of the squared bias, where it is "
        "above zero; an arrow: its interval reaches zero"
    )
    figure.text(0.01, 0.02, note, fontsize=NOTE_PT, color=INK)
    return save_figure(figure, folder / FILE_NAME, ("png", "pdf"))


def _styles(rows: Sequence[Row]) -> dict[str, SchemeStyle]:
    names = list(dict.fromkeys(row.scheme for row in rows))
    return dict(zip(names, scheme_styles(names), strict=True))


def _draw_rows(ax: Axes, rows: Sequence[Row], styles: dict[str, SchemeStyle]) -> None:
    ax.set_xscale("log")
    for y, row in enumerate(rows):
        colour, numbers = styles[row.scheme].colour, row.numbers[0]
        error, bias = numbers[Measure.ERROR], numbers[Measure.BIAS]
        if error.mean is not None:
            ax.plot([error.mean], [y], "o", color=colour, markersize=5)
            _draw_interval(ax, error.interval, y, colour)
        if bias.mean is not None and bias.mean > 0:
            look = {"markerfacecolor": "white", "markersize": 5}
            ax.plot([math.sqrt(bias.mean)], [y], "o", color=colour, **look)  # type: ignore[arg-type]
            if bias.interval is not None and bias.interval[0] > 0:
                low, high = map(math.sqrt, bias.interval)
                _draw_interval(ax, (low, high), y, colour)
            elif bias.interval is not None:
                ax.plot([math.sqrt(bias.mean)], [y], marker=8, color=colour, markersize=7)
    ax.set_yticks(range(len(rows)))
    names = [row.scheme if row.part == WHOLE else f"{row.part} alone" for row in rows]
    ax.set_yticklabels(list(map(printable, names)), fontsize=TICK_PT)
    ax.set_ylim(len(rows) - 0.5, -0.5)


def _draw_interval(ax: Axes, bounds: tuple[float, float] | None, y: float, colour: str) -> None:
    if bounds is not None and bounds[0] > 0:
        ax.plot(bounds, [y, y], color=colour, linewidth=1.4)


def _draw_layers(
    ax: Axes, outcome: Outcome, rows: Sequence[Row], styles: dict[str, SchemeStyle]
) -> None:
    """The raw error of each whole scheme in each group of parameters."""
    ends = []
    places = range(len(outcome.groups))
    ax.set_yscale("log")
    for row in rows:
        means = [numbers[Measure.ERROR].mean for numbers in row.numbers[1:]]
        if row.part != WHOLE or None in means:
            continue
        style, values = styles[row.scheme], [max(mean or 0.0, 1e-12) for mean in means]
        look = {"color": style.colour, "linestyle": style.linestyle, "marker": style.marker}
        ax.plot(places, values, linewidth=1.6, markersize=4, **look)  # type: ignore[arg-type]
        ends.append((places[-1], values[-1], printable(row.scheme), style))
    ax.set_xticks(places)
    ax.set_xticklabels(outcome.groups, rotation=90 if len(places) > 6 else 30, ha="right")
    dress(ax, f"Error by layer, {TITLES[RAW]}", "", "relative to the gradient in fp32")
    low, high = ax.get_ylim()
    linear = [(x, _place(y, low, high), name, style) for x, y, name, style in ends]
    name_lines(ax, linear)


def _place(y: float, low: float, high: float) -> float:
    """Where a linear axis with the same limits has the height of y."""
    return low + (high - low) * math.log(y / low) / math.log(high / low)
