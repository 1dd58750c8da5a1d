"""The heat map of a tensor: the largest magnitude of each cell, and of each row and column of cells.

Colour is log2 of the magnitude, viridis, from the largest cell down to the smallest 0.5 % of cells, at most 20 octaves;
cells of zeros alone are white, and cells with NaN or Inf vermillion. Lines beside the picture are the largest and the
median cell of each row and column, so that a channel or a token that stands out is seen even where it is thinner than a
pixel.
"""

from __future__ import annotations

import math
import warnings
from functools import cache

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from quantexp.analysis.draw.reduce import Array, Cells, cells_of
from quantexp.analysis.draw.titles import write_titles
from quantexp.analysis.measures.counted import CountedTensor
from quantexp.analysis.style import (
    BLACK,
    GREY,
    INK,
    LABEL_PT,
    NOTE_PT,
    TICK_PT,
    VERMILLION,
    new_figure,
    power_of_two,
    say_instead,
)

_WIDTH_INCH, _HEIGHT_INCH = 8.4, 6.0
_MOST_ROWS, _MOST_COLUMNS = 256, 384
_OCTAVES = 20
#: The fraction of cells with the darkest colour, because a few small cells would use up the contrast.
_LOWEST_SHARE = 0.005


def draw_heatmap(counted_tensor: CountedTensor, source: str) -> Figure:
    """The figure; a message for a tensor without elements, or without non-zero elements."""
    figure = new_figure(_WIDTH_INCH, _HEIGHT_INCH)
    write_titles(figure, counted_tensor, source)
    picture = figure.add_axes((0.095, 0.1, 0.66, 0.66))
    if not counted_tensor.record["count"]:
        say_instead(picture, "empty")
        return figure
    cells = cells_of(
        counted_tensor.values, counted_tensor.entry.metadata, _MOST_ROWS, _MOST_COLUMNS
    )
    low, high = _range(cells.amax_RC)
    _draw_cells(figure, picture, cells, low, high)
    _draw_margins(figure, cells)
    return figure


def _range(amax_RC: Array) -> tuple[float, float]:
    """The exponent range of the colours."""
    usable = amax_RC[np.isfinite(amax_RC) & (amax_RC > 0)]
    if not usable.size:
        return -1.0, 1.0
    high = math.log2(float(usable.max()))
    low = max(math.log2(float(np.quantile(usable, _LOWEST_SHARE))), high - _OCTAVES)
    return (low, high) if high - low >= 2 else (math.floor(high) - 1.0, math.ceil(high) + 1.0)


@cache
def _colours() -> Colormap:
    from matplotlib import colormaps

    return colormaps["viridis"].with_extremes(bad=VERMILLION, under="white")


def _log2(amax: Array) -> Array:
    """log2 of the cells: NaN for values that are not finite, -inf for zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: Array = np.log2(amax.astype(np.float64))
    logs[~np.isfinite(amax)] = np.nan
    return logs


def _draw_cells(figure: Figure, ax: Axes, cells: Cells, low: float, high: float) -> None:
    logs = _log2(cells.amax_RC)
    is_zero, is_bad = np.isneginf(logs), np.isnan(logs)
    shown = np.where(is_zero, low - 1, np.maximum(logs, low))  # small is not zero
    ax.imshow(
        np.ma.masked_where(is_bad, shown) if is_bad.any() else shown,
        aspect="auto",
        interpolation="nearest",
        cmap=_colours(),
        vmin=low,
        vmax=high,
        extent=(0, cells.num_columns, cells.num_rows, 0),
    )
    ax.set_xlabel(_with_size(cells.column_label, cells.columns_each), fontsize=LABEL_PT, color=INK)
    ax.set_ylabel(_with_size(cells.row_label, cells.rows_each), fontsize=LABEL_PT, color=INK)
    ax.tick_params(labelsize=TICK_PT, colors=INK)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    _draw_scale(figure.add_axes((0.905, 0.1, 0.018, 0.66)), low, high, _what(cells))
    notes = {"white: zeros alone": is_zero.any(), "red: NaN or Inf": is_bad.any()}
    words = ",  ".join(note for note, holds in notes.items() if holds)
    figure.text(0.985, 0.885, words, fontsize=NOTE_PT, color=INK, ha="right")


def _draw_scale(ax: Axes, low: float, high: float, words: str) -> None:
    """Draw the legend of the colours, which is much faster than a colorbar."""
    ramp = np.linspace(low, high, 128)[:, None]
    ax.imshow(ramp, aspect="auto", cmap=_colours(), origin="lower", extent=(0, 1, low, high))
    ax.set_xticks([])
    ax.yaxis.tick_right()
    ax.yaxis.set_label_position("right")
    ax.yaxis.set_major_locator(MaxNLocator(7, integer=True))
    ax.yaxis.set_major_formatter(FuncFormatter(_power))
    ax.tick_params(labelsize=TICK_PT, colors=INK)
    ax.set_ylabel(words, fontsize=LABEL_PT, color=INK)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _what(cells: Cells) -> str:
    each = cells.rows_each * cells.columns_each
    if each == 1:
        return "|x|"
    return f"largest |x| of {cells.rows_each} x {cells.columns_each} elements"


def _with_size(label: str, each: int) -> str:
    return label if each == 1 else f"{label} ({each} to a cell)"


def _draw_margins(figure: Figure, cells: Cells) -> None:
    """Draw the largest and median cell of each column above, and of each row on the right."""
    above = figure.add_axes((0.095, 0.775, 0.66, 0.1))
    beside = figure.add_axes((0.77, 0.1, 0.09, 0.66))
    logs = _log2(cells.amax_RC)
    _draw_margin(above, logs, 0, _edges(cells.num_columns, cells.columns_each))
    _draw_margin(beside, logs, 1, _edges(cells.num_rows, cells.rows_each))
    for place, (word, colour) in enumerate((("largest", BLACK), ("median", GREY))):
        figure.text(0.775, 0.845 - 0.03 * place, "\u2014", fontsize=9, color=colour, va="center")
        figure.text(0.8, 0.845 - 0.03 * place, word, fontsize=NOTE_PT, color=INK, va="center")


def _edges(extent: int, each: int) -> Array:
    edges: Array = np.minimum(np.arange(-(-extent // each) + 1) * each, extent)
    return edges


def _draw_margin(ax: Axes, logs: Array, axis: int, edges: Array) -> None:
    lines = _lines(logs, axis)
    usable = np.concatenate([line[np.isfinite(line)] for line in lines])
    low, high = (usable.min(), usable.max()) if usable.size else (-1.0, 1.0)
    room = max(1.0, 0.15 * (high - low))
    for line, colour in zip(lines, (GREY, BLACK), strict=True):
        level = np.maximum(line, low - room)
        x, y = np.repeat(edges, 2)[1:-1], np.repeat(level, 2)
        ax.plot(*((y, x) if axis else (x, y)), color=colour, lw=0.8)
    ax.tick_params(labelsize=NOTE_PT, colors=INK)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    along, across = (ax.yaxis, ax.xaxis) if axis else (ax.xaxis, ax.yaxis)
    limits, values = (edges[0], edges[-1]), (low - room, high + room)
    ax.set_xlim(*(values if axis else limits))
    ax.set_ylim(*(limits[::-1] if axis else values))
    along.set_ticks([])
    across.set_major_locator(MaxNLocator(3, integer=True))
    across.set_major_formatter(FuncFormatter(_power))


def _power(exponent: float, _: object = None) -> str:
    return power_of_two(round(exponent))


def _lines(logs: Array, axis: int) -> tuple[Array, Array]:
    """The median and the largest finite cell along an axis; -inf if no cell is finite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing but NaN
        peak, middle = np.nanmax(logs, axis=axis), np.nanmedian(logs, axis=axis)
    return np.nan_to_num(middle, nan=-np.inf, neginf=-np.inf), np.nan_to_num(
        peak, nan=-np.inf, neginf=-np.inf
    )
