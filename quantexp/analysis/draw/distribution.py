"""The figure of a tensor's distribution: magnitudes over the declared format's grid, box plots, Q-Q plot.

a  share of the elements by magnitude, on a log2 axis, negative ones below the positive ones; under it the magnitudes
   that the declared format represents at the scales of this tensor's blocks, and a box plot of the magnitudes
b  a box plot of the signed values
c  quantiles against those of a normal distribution of the same mean and standard deviation

All of it from the exact count of each value. What has no finite, or no non-zero, element says so in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from quantexp.analysis.draw.grids import Grid
from quantexp.analysis.draw.spread import magnitude_bars, normal_points, quantiles
from quantexp.analysis.draw.titles import write_titles
from quantexp.analysis.measures.counted import CountedTensor
from quantexp.analysis.style import (
    BLACK,
    INK,
    NOTE_PT,
    TICK_PT,
    dress,
    new_figure,
    power_of_two,
    quant_colour,
    say_instead,
)

WIDTH_INCH, HEIGHT_INCH = 10.5, 4.6
_NUM_POINTS = 161
_BOX = torch.tensor([0, 0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999, 1], dtype=torch.float64)
_BOX_WORDS = "box: quartiles; whiskers: 1, 99 %; ticks: 0.1, 99.9 %; dots: extremes"
#: The number of standard deviations above which the Q-Q plot's data axis is logarithmic beyond 3.
_LONG_TAIL = 12.0


def draw_distribution(counted_tensor: CountedTensor, grids: Sequence[Grid], source: str) -> Figure:
    """The figure; `source` names the run or folder."""
    figure = new_figure(WIDTH_INCH, HEIGHT_INCH)
    write_titles(figure, counted_tensor, source)
    left = figure.add_gridspec(
        3,
        1,
        left=0.075,
        right=0.575,
        top=0.82,
        bottom=0.12,
        height_ratios=[6, 0.45 + 0.42 * max(1, len(grids)), 0.9],
        hspace=0.06,
    )
    right = figure.add_gridspec(
        2, 1, left=0.655, right=0.985, top=0.82, bottom=0.12, height_ratios=[1, 4.2], hspace=0.6
    )
    colour = quant_colour(str(counted_tensor.entry.metadata.get("quant_type")))
    _draw_magnitudes(
        [figure.add_subplot(left[row]) for row in range(3)], counted_tensor, grids, colour
    )
    marks = quantiles(counted_tensor.counted, _BOX).tolist()
    draw_values(figure.add_subplot(right[0]), marks, counted_tensor.finding, colour)
    _draw_normal(figure.add_subplot(right[1]), counted_tensor, colour)
    return figure


def _draw_magnitudes(
    axes: Sequence[Axes],
    counted_tensor: CountedTensor,
    grids: Sequence[Grid],
    colour: str,
) -> None:
    bars, rows, box = axes
    dress(bars, "a  Magnitudes", "", "share of elements per octave")
    magnitudes = magnitude_bars(counted_tensor.counted)
    if magnitudes is None or len(magnitudes.edges) == 2:
        say_instead(bars, _instead_of_bars(counted_tensor))
        for ax in (rows, box):
            ax.set_axis_off()
        return
    total = [p + n for p, n in zip(magnitudes.positive, magnitudes.negative, strict=True)]
    if any(magnitudes.positive):
        _fill(bars, magnitudes.edges, total, colour, 0.55)
    if any(magnitudes.negative):
        _fill(bars, magnitudes.edges, magnitudes.negative, colour, 1.0)
    limits = _limits(counted_tensor, magnitudes.edges, grids)
    bars.set_ylim(0, 1.22 * max(total))
    bars.yaxis.set_major_formatter(PercentFormatter(1, 0 if max(total) > 0.05 else 1))
    bars.yaxis.set_major_locator(MaxNLocator(5))
    signs = {
        "positive": (any(magnitudes.positive), 0.55),
        "negative": (any(magnitudes.negative), 1.0),
    }
    named = [(sign, alpha) for sign, (is_there, alpha) in signs.items() if is_there]
    for row, (sign, alpha) in enumerate(named):
        y = 0.95 - 0.07 * row
        bars.text(
            0.015,
            y,
            "\u25a0",
            transform=bars.transAxes,
            va="center",
            fontsize=10,
            color=colour,
            alpha=alpha,
        )
        bars.text(0.04, y, sign, transform=bars.transAxes, va="center", fontsize=NOTE_PT, color=INK)
    note_what_has_no_place(bars, counted_tensor.record)
    is_known = counted_tensor.entry.metadata.get("formats") is not None
    draw_grids(rows, grids, "no product quantises it" if is_known else "declared format unknown")
    _draw_magnitude_box(box, counted_tensor, colour)
    log2_axis(bars, limits)
    log2_axis(box, limits)
    bars.tick_params(axis="x", length=0, labelbottom=False)
    rows.set_xscale("log", base=2)
    rows.set_xlim(*limits)
    for axis in (rows.xaxis, box.xaxis):
        axis.grid(visible=False)
    rows.xaxis.set_major_locator(NullLocator())
    rows.xaxis.set_minor_locator(NullLocator())
    box.set_xlabel("|x|", fontsize=9, color=INK)


def _instead_of_bars(counted_tensor: CountedTensor) -> str:
    """The range if there are no magnitudes, or all are in one bar."""
    ends = quantiles(counted_tensor.counted, torch.tensor([0.0, 1.0]), magnitudes=True).tolist()
    if not ends:
        return counted_tensor.finding or "no element to draw"
    low, high = ends
    words = f"|x| is {low:.6g}" if low == high else f"|x| is between {low:.6g} and {high:.6g}"
    return f"{words}\nwherever it is not zero" if counted_tensor.record["zeros"] else words


def _fill(
    ax: Axes, edges: Sequence[float], height: Sequence[float], colour: str, alpha: float
) -> None:
    x, y = np.repeat(edges, 2)[1:-1], np.repeat(height, 2)
    ax.fill_between(x, y, facecolor=colour, alpha=alpha, linewidth=0)


def _limits(
    counted_tensor: CountedTensor, edges: Sequence[float], grids: Sequence[Grid]
) -> tuple[float, float]:
    """The range of the data and of the grid, limited to one octave below the smallest value of the data."""
    low, high = edges[0], edges[-1]
    for grid in grids:
        if grid.magnitudes:
            low, high = min(low, grid.magnitudes[0]), max(high, grid.magnitudes[-1])
    exact = float(quantiles(counted_tensor.counted, torch.tensor([1e-4]), magnitudes=True)[0])
    low = max(low, exact / 256)  # a few stray tiny values would squeeze all others
    return low / 2, high * 2


def log2_axis(ax: Axes, limits: tuple[float, float]) -> None:
    """Ticks at powers of two, at most eight with a label."""
    ax.set_xscale("log", base=2)
    ax.set_xlim(*limits)
    first, last = math.ceil(math.log2(limits[0])), math.floor(math.log2(limits[1]))
    step = max(1, math.ceil((last - first) / 8))
    marked = [e for e in range(first - first % step, last + 1, step) if e >= first]
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_ticks([2.0**e for e in marked], [power_of_two(e) for e in marked])
    ax.grid(visible=True, axis="x", color="#E4E4E4", linewidth=0.7)


def note_what_has_no_place(ax: Axes, record: Mapping[str, Any]) -> None:
    """Print the numbers of zeros, NaN and Inf into the corner."""
    count = record["count"]
    words = [f"zero: {_percent(record['zeros'] / count)}"] if record["zeros"] else []
    words += [
        f"{name}: {record[key]:,}" for key, name in (("nan", "NaN"), ("inf", "Inf")) if record[key]
    ]
    if words:
        text = "not on this axis\n" + "\n".join(words)
        ax.text(0.985, 0.96, text, transform=ax.transAxes, ha="right", va="top", fontsize=NOTE_PT)


def _percent(share: float) -> str:
    return f"{share:.2%}" if share >= 1e-4 else f"{share:.1e}"


def draw_grids(ax: Axes, grids: Sequence[Grid], without: str) -> None:
    """Draw a row of ticks for each grid, and name declared formats that cannot be drawn."""
    _bare(ax)
    ax.set_ylim(len(grids) - 0.4 if grids else 0.6, -0.6)
    if not grids:
        ax.text(0.01, 0, without, transform=ax.get_yaxis_transform(), fontsize=NOTE_PT, va="center")
    for row, grid in enumerate(grids):
        ax.vlines(grid.magnitudes, row - 0.1, row + 0.42, color=quant_colour(grid.format), lw=0.7)
        ax.text(
            0.005,
            row - 0.32,
            grid.label,
            transform=ax.get_yaxis_transform(),
            fontsize=6,
            va="center",
            color=INK,
        )


def _draw_magnitude_box(ax: Axes, counted_tensor: CountedTensor, colour: str) -> None:
    _bare(ax)
    _draw_box(ax, quantiles(counted_tensor.counted, _BOX, magnitudes=True).tolist(), colour)


def _bare(ax: Axes) -> None:
    """Axes as a strip below others."""
    ax.set_yticks([])
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=TICK_PT, colors=INK)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _draw_box(ax: Axes, marks: Sequence[float], colour: str) -> None:
    """Draw a horizontal box at height 0, from the nine quantiles of `_BOX`."""
    low, p001, p01, q1, middle, q3, p99, p999, high = marks
    ax.hlines([0, 0], [p01, q3], [q1, p99], color=INK, lw=1)
    ax.vlines([p01, p99], -0.22, 0.22, color=INK, lw=1)
    ax.vlines([p001, p999], -0.12, 0.12, color=INK, lw=1)
    ax.fill([q1, q3, q3, q1], [-0.32, -0.32, 0.32, 0.32], facecolor=colour, edgecolor=INK, lw=0.8)
    ax.vlines([middle], -0.32, 0.32, color=BLACK, lw=1.8)
    ax.plot([low, high], [0, 0], "o", ms=2.5, mew=0, color=INK)
    ax.set_ylim(-0.6, 0.6)


def draw_values(ax: Axes, marks: Sequence[float], finding: str | None, colour: str) -> None:
    """Draw a box of the values from the nine quantiles of `_BOX`; without them, say the finding."""
    dress(ax, "b  Values", "x", "", grid="x")
    ax.set_xlabel(f"x   ({_BOX_WORDS})", fontsize=6, color=INK)
    if not marks:
        say_instead(ax, finding or "no element to draw")
        return
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    _draw_box(ax, marks, colour)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


def _draw_normal(ax: Axes, counted_tensor: CountedTensor, colour: str) -> None:
    label = "standard normal quantile"
    dress(ax, "c  Against a normal", label, "(x - mean) / std", grid="both")
    record = counted_tensor.record
    if not record["std"]:
        constant = "one value alone: no spread" if record["count"] - record["nonfinite"] else ""
        say_instead(ax, constant or counted_tensor.finding or "no element to draw")
        return
    z, value = normal_points(counted_tensor.counted, _NUM_POINTS)
    standard = (value - record["mean"]) / record["std"]
    ends = [float(z[0]), float(z[-1])]
    ax.plot(ends, ends, color=BLACK, lw=0.9, ls="--", label="normal")
    ax.plot(z.tolist(), standard.tolist(), ".", ms=3.5, mew=0, color=colour)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    finish_normal(ax, record, float(standard.abs().max()))


def finish_normal(ax: Axes, record: Mapping[str, Any], largest: float) -> None:
    """Scale the axis of the standardised values by the largest magnitude, and write their moments."""
    if largest > _LONG_TAIL:
        ax.set_yscale("symlog", linthresh=3, linscale=1)
        ax.set_ylabel("(x - mean) / std, log beyond 3", fontsize=9, color=INK)
    if record["skew"] is not None and record["kurtosis"] is not None:
        words = f"skew {record['skew']:.3g}\nkurtosis {record['kurtosis']:.4g} (normal: 3)"
        ax.text(0.03, 0.96, words, transform=ax.transAxes, va="top", fontsize=NOTE_PT, color=INK)
