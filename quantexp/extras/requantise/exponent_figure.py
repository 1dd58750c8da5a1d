"""The figure of the scale study: error of each operand against the exponent of the scale, in each format.

Two bands of panels. Above MX formats over the offset of the block exponent from the floor rule's, below formats with a
scale of the tensor over the power of two that amax is brought to. In each band SQNR, underflow and saturation; a curve
is the median over the tensors of one operand, a dotted line what schemes do (for MX the floor rule).
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from quantexp.analysis.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    TICK_PT,
    VERMILLION,
    YELLOW,
    dress,
    new_figure,
    save_png,
)
from quantexp.capture.statistics.errors import Fidelity
from quantexp.extras.requantise.exponent import Point
from quantexp.extras.requantise.files import medians
from quantexp.extras.requantise.tally import Tally
from quantexp.formats import Family, Format
from quantexp.quant.choosing import FORWARD_AMAX, GRADIENT_AMAX
from quantexp.runs.disk import write_whole

#: Operand -> name, colour, marker.
_CURVES = {
    "x": ("linear input x", SKY, "o"),
    "w": ("weight w", ORANGE, "s"),
    "g": ("linear output gradient g", BLACK, "^"),
    "q": ("query q", BLUE, "v"),
    "k": ("key k", GREEN, "D"),
    "P": ("attention weights P", VERMILLION, "P"),
    "dS": ("score gradient dS", YELLOW, "*"),
    "v": ("value v", PURPLE, "X"),
    "dO": ("attention output gradient dO", GREY, "<"),
}
#: The rows of a band: value, name, and factor to the unit.
_ROWS = (
    ("sqnr_db", "SQNR (dB)", 1.0),
    ("underflow_share", "underflow (% of non-zero)", 100.0),
    ("saturated_share", "saturated (%)", 100.0),
)
_OFFSET_LABEL = "log2(block scale / floor rule's)"
_TARGET_LABEL = "log2(what amax is brought to)"
#: The minimum range of a row's vertical axis, so that tiny values look tiny.
_LEAST_REACH = 5.0
_PANEL_INCH, _ROW_INCH, _TITLE_INCH = 2.7, 1.75, 0.35
#: The height of the legend above all panels.
_ENTRY_INCH, _LINE_INCH = 2.1, 0.18

#: Operand -> point -> the medians over its tensors.
Curves = Mapping[str, Mapping[Point, Fidelity]]


def draw_study(tally: Tally) -> Figure:
    """The figure; values that are not finite leave gaps."""
    points = tally.work.points
    curves = {
        operand: {p: medians(f) for p, f in zip(points, tally.study[operand], strict=True)}
        for operand in _CURVES
        if operand in tally.study
    }
    formats = list(dict.fromkeys(point.format for point in points))
    bands = [[f for f in formats if (f.family is Family.MX) is mx] for mx in (True, False)]
    bands = [band for band in bands if band]
    width = max(len(band) for band in bands)
    width_inch = max(8.0, _PANEL_INCH * width + 0.8)
    columns = max(2, int(width_inch / _ENTRY_INCH))
    top_inch = _LINE_INCH * math.ceil((len(curves) + 1) / columns) + _TITLE_INCH
    height = len(bands) * (3 * _ROW_INCH + 0.9) + top_inch
    figure = new_figure(width_inch, height)
    top = 1 - top_inch / height
    grid = figure.add_gridspec(
        len(bands),
        1,
        left=0.7 / figure.get_figwidth(),
        right=0.99,
        top=top,
        bottom=0.6 / height,
        hspace=0.2,
    )
    for row, band in enumerate(bands):
        cells = grid[row].subgridspec(3, width, hspace=0.12, wspace=0.16)
        rows: list[list[Axes]] = [[], [], []]
        for column, fmt in enumerate(band):
            axes = [figure.add_subplot(cells[i, column]) for i in range(3)]
            _draw_format(axes, fmt, [p for p in points if p.format == fmt], curves, column == 0)
            for together, ax in zip(rows, axes, strict=True):
                together.append(ax)
        for together in rows:
            _same_reach(together)
    _add_legend(figure, curves, columns)
    return figure


def write_study(figure: Figure, folder: Path) -> list[Path]:
    """Save `scale_exponent.png` and `.svg`; the same study gives the same bytes."""
    picture, path = save_png(figure, folder / "scale_exponent.png"), folder / "scale_exponent.svg"
    stream = io.StringIO()
    with rc_context({"svg.hashsalt": "scale exponent"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    write_whole(path, stream.getvalue())
    return [picture, path]


def _draw_format(
    axes: Sequence[Axes], fmt: Format, points: Sequence[Point], curves: Curves, is_first: bool
) -> None:
    """Draw one column: the three numbers of one format over the same exponents."""
    exponents = [point.exponent for point in points]
    is_mx = fmt.family is Family.MX
    for ax, (name, label, factor) in zip(axes, _ROWS, strict=True):
        is_top, is_bottom = ax is axes[0], ax is axes[-1]
        x_label = (_OFFSET_LABEL if is_mx else _TARGET_LABEL) if is_bottom else ""
        dress(ax, fmt.name if is_top else "", x_label, label if is_first else "", grid="both")
        for operand, by_point in curves.items():
            values = [factor * getattr(by_point[point], name) for point in points]
            drawn = [value if math.isfinite(value) else math.nan for value in values]
            _, colour, marker = _CURVES[operand]
            ax.plot(exponents, drawn, marker=marker, color=colour, ms=3, mew=0, lw=1.1)
        for usual in _usual(fmt):
            ax.axvline(usual, color=INK, lw=0.9, ls=":")
        if not is_bottom:
            ax.tick_params(labelbottom=False)
        ax.set_xlim(exponents[0] - 0.5, exponents[-1] + 0.5)


def _same_reach(axes: Sequence[Axes]) -> None:
    """Give the panels of a row one vertical range, from 0 or the minimum, so that formats are comparable."""
    limits = [line_limits for ax in axes if (line_limits := _drawn_limits(ax)) is not None]
    top = max([_LEAST_REACH, *(high for _, high in limits)])
    bottom = min([0.0, *(low for low, _ in limits)])
    for ax in axes:
        ax.set_ylim(bottom - 0.02 * top, 1.05 * top)
        if ax is not axes[0]:
            ax.tick_params(labelleft=False)


def _drawn_limits(ax: Axes) -> tuple[float, float] | None:
    curves = [line for line in ax.get_lines() if line.get_marker() != "None"]
    values = [float(y) for line in curves for y in np.asarray(line.get_ydata(), dtype=float)]
    finite = [y for y in values if math.isfinite(y)]
    return (min(finite), max(finite)) if finite else None


def _usual(fmt: Format) -> list[float]:
    """Mark the scale of the schemes."""
    match fmt.family:
        case Family.MX:
            return [0.0]
        case Family.HIF8:
            return [math.log2(FORWARD_AMAX), math.log2(GRADIENT_AMAX)]
        case _:
            assert fmt.amax_target is not None
            return [math.log2(fmt.amax_target)]


def _add_legend(figure: Figure, curves: Curves, columns: int) -> None:
    styles = [_CURVES[operand] for operand in curves]
    handles = [
        Line2D([], [], color=colour, marker=marker, ms=4, mew=0, lw=1.2, label=name)
        for name, colour, marker in styles
    ]
    handles.append(Line2D([], [], color=INK, lw=0.9, ls=":", label="what schemes do (MX: floor)"))
    figure.legend(
        handles=handles,
        loc="upper left",
        ncols=columns,
        frameon=False,
        fontsize=TICK_PT,
        borderaxespad=0.3,
        borderpad=0.2,
    )
