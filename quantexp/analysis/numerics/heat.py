"""Heat maps of measures: a row for each series of each module, a column for each layer, a panel for each measure.

A cell is the median over iterations, micro-batches, ranks and experts. Cells without a finite number are hatched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from quantexp.analysis.numerics.lines import (
    LEAST_SHARE,
    finite,
    percent,
    write_note,
    write_title,
)
from quantexp.analysis.numerics.series import Measure, Member, Scale, in_order, modules_of
from quantexp.analysis.style import LABEL_PT, NOTE_PT, TICK_PT, dress, new_figure, power_of_two

#: A perceptually uniform colour map for any colour vision.
COLOUR_MAP = "cividis"
_CELL_INCH, _ROW_INCH = 0.3, 0.17
_NAMES_INCH, _BAR_INCH = 1.75, 1.15
_TOP_INCH, _BOTTOM_INCH, _GAP_INCH = 0.75, 0.3, 0.75


def draw_heat(title: str, about: str, panels: Mapping[Measure, Sequence[Member]]) -> Figure:
    """The figure, with two panels in a row."""
    everyone = [member for members in panels.values() for member in members]
    by_layer = {member.place.layer: member.place.layer_label for member in everyone}
    layers = sorted(by_layer)
    labels = [by_layer[layer] for layer in layers]
    names = _rows(everyone)
    map_width = min(9.0, max(2.2, _CELL_INCH * len(layers)))
    map_height = max(1.2, _ROW_INCH * len(names))
    columns = min(2, len(panels))
    num_rows = math.ceil(len(panels) / columns)
    panel_width = max(_NAMES_INCH + map_width + _BAR_INCH, 6.5 / columns)
    width = columns * panel_width
    height = _TOP_INCH + num_rows * (map_height + _GAP_INCH) + _BOTTOM_INCH
    figure = new_figure(width, height)
    hatched = False
    for place, (measure, members) in enumerate(panels.items()):
        row, column = divmod(place, columns)
        left = column * panel_width + _NAMES_INCH
        bottom = height - _TOP_INCH - (row + 1) * map_height - row * _GAP_INCH - 0.1
        box = (left / width, bottom / height, map_width / width, map_height / height)
        bar_box = ((left + map_width + 0.1) / width, box[1], 0.13 / width, box[3])
        cells = _cells(members, names, layers)
        hatched = hatched or bool(np.isnan(cells).any())
        _draw_map(figure, box, bar_box, measure, cells, names, labels)
    write_title(figure, title, about)
    words = "cell: the median over iterations, micro-batches, ranks and experts of a layer"
    write_note(figure, words + ("; hatched: no such tensor, or no finite number" * hatched))
    return figure


def _rows(members: Sequence[Member]) -> list[tuple[str, str]]:
    """(module, series), modules as in the forward pass."""
    return [
        (module, series)
        for module in modules_of(members)
        for series in in_order(m.series for m in members if m.module == module)
    ]


def _cells(
    members: Sequence[Member], names: Sequence[tuple[str, str]], layers: Sequence[int]
) -> np.ndarray:
    values: dict[tuple[int, int], list[float]] = {}
    for member in members:
        where = (names.index((member.module, member.series)), layers.index(member.place.layer))
        values.setdefault(where, []).append(member.value)
    cells = np.full((len(names), len(layers)), np.nan)
    for where, numbers in values.items():
        if kept := finite(numbers):
            cells[where] = median(kept)
    return cells


def _draw_map(
    figure: Figure,
    box: tuple[float, float, float, float],
    bar_box: tuple[float, float, float, float],
    measure: Measure,
    cells: np.ndarray,
    names: Sequence[tuple[str, str]],
    layers: Sequence[str],
) -> None:
    ax = figure.add_axes(box)
    dress(ax, "", "layer", "")
    ax.set_title(measure.label, fontsize=LABEL_PT, loc="left")
    ax.grid(visible=False)
    hatch(ax)
    image = ax.imshow(cells, aspect="auto", cmap=COLOUR_MAP, norm=_norm(measure.scale, cells))
    size = TICK_PT if len(names) <= 40 else NOTE_PT
    ax.set_yticks(range(len(names)), [f"{m} {s}" for m, s in names], fontsize=size)
    ax.tick_params(length=0)
    _number_layers(ax, layers)
    for row in range(1, len(names)):
        if names[row][0] != names[row - 1][0]:
            ax.axhline(row - 0.5, color="white", lw=1.6)
    bar = figure.colorbar(image, cax=figure.add_axes(bar_box))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=TICK_PT)
    if measure.scale in (Scale.SHARE, Scale.PERCENT):
        bar.ax.minorticks_off()
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(round(value, 9))))
    elif measure.scale is Scale.LOG2:
        label_powers(bar.ax)


def label_powers(ax: Axes) -> None:
    """Ticks at powers of two on a vertical logarithmic axis that spans more than one."""
    low, high = ax.get_ylim()
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    if last > first:
        ticks = range(first, last + 1, max(1, math.ceil((last - first) / 6)))
        ax.minorticks_off()
        ax.set_yticks([2.0**e for e in ticks], [power_of_two(e) for e in ticks])
    ax.tick_params(labelsize=TICK_PT)


def hatch(ax: Axes) -> None:
    """The background of cells without a number."""
    ax.set_facecolor("white")
    ax.patch.set_hatch("////")
    ax.patch.set_edgecolor("#BBBBBB")


def _number_layers(ax: Axes, layers: Sequence[str]) -> None:
    step = max(1, math.ceil(len(layers) / 16))
    shown = range(0, len(layers), step)
    ax.set_xticks(list(shown), [layers[place] for place in shown])


def _norm(scale: Scale, cells: np.ndarray) -> Normalize:
    known = cells[np.isfinite(cells)]
    if scale is Scale.SHARE:
        return SymLogNorm(LEAST_SHARE, linscale=0.4, vmin=0, vmax=max(1e-4, *known, 0.0))
    if scale is Scale.LOG2:
        known = known[known > 0]
        low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 2.0)
        return LogNorm(low, high if high > low else 2 * low)
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if scale is Scale.PERCENT:
        return Normalize(0, max(1e-3, high))
    middle, reach = (low + high) / 2, max(0.5, (high - low) / 2)
    return Normalize(middle - reach, middle + reach)
