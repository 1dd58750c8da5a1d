"""A grid of line plots: a row for each measure, a column for each module, a line for each series.

A line is the median of what lies at the same layer (iteration, rank), the band around it reaches from the least to the
largest. A number that is not finite leaves a gap and is counted in the note below.

A tensor has the same `Mark` (colour, marker and line) in every figure. An operand has the colour of the tensor that it
is; gradients of a tensor have its colour and an open marker; the line says the product: solid forward, dashed dgrad,
dotted wgrad.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from quantexp.analysis.numerics.series import (
    Measure,
    Member,
    Scale,
    by_key,
    in_order,
    modules_of,
)
from quantexp.analysis.scheme_style import Dash
from quantexp.analysis.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    INK,
    NOTE_PT,
    ORANGE,
    PURPLE,
    SKY,
    TICK_PT,
    TITLE_PT,
    VERMILLION,
    YELLOW,
    dress,
    new_figure,
    power_of_two,
)
from quantexp.analysis.tensors.operands import tensor_called
from quantexp.capture.operands import SCALE, source_of
from quantexp.model.decoder import OUTPUT

#: The linear threshold of the axis of fractions.
LEAST_SHARE = 1e-6
_PANEL_INCH, _ROW_INCH = 2.5, 1.9
_LEFT_INCH, _TOP_INCH, _BOTTOM_INCH = 1.0, 0.98, 0.75
#: The distance from a row's axis to its label, which may have two lines.
_LABEL_INCH = 0.68
_LEGEND_ENTRY_INCH = 1.35
#: Lines with more points have no markers.
_FEW_POINTS = 24


def draw_lines(
    title: str,
    about: str,
    rows: Mapping[Measure, Sequence[Member]],
    key: Callable[[Member], int],
    x_label: str,
) -> Figure:
    """The figure, with a column for each module of any row."""
    everyone = [member for members in rows.values() for member in members]
    modules = modules_of(everyone)
    names = in_order(member.series for member in everyone)
    width = max(6.5, _LEFT_INCH + _PANEL_INCH * len(modules))
    top = _TOP_INCH + legend_inch(width, names)
    height = top + _ROW_INCH * len(rows) + _BOTTOM_INCH
    figure = new_figure(width, height)
    axes = figure.subplots(len(rows), len(modules), squeeze=False, sharey="row", sharex=True)
    figure.subplots_adjust(
        left=_LEFT_INCH / width,
        right=1 - 0.15 / width,
        top=1 - top / height,
        bottom=_BOTTOM_INCH / height,
        hspace=0.16,
        wspace=0.08,
    )
    missing = 0
    is_by_layer = x_label == "layer"
    beyond = {m.place.layer for m in everyone if is_by_layer and m.module == OUTPUT}
    for row, (measure, members) in enumerate(rows.items()):
        missing += sum(not math.isfinite(member.value) for member in members)
        for column, module in enumerate(modules):
            ax = axes[row, column]
            here = [member for member in members if member.module == module]
            is_bottom, is_left = row == len(rows) - 1, column == 0
            if not here and members:
                ax.set_visible(False)
            dress(
                ax,
                module if row == 0 else "",
                x_label if is_bottom else "",
                measure.label if is_left else "",
                grid="both",
            )
            draw_panel(ax, by_key(here, key), measure)
            if beyond:
                ax.xaxis.set_major_formatter(
                    FuncFormatter(lambda x, _: OUTPUT if x in beyond else f"{x:g}")
                )
            if is_left:
                ax.yaxis.set_label_coords(-_LABEL_INCH / _PANEL_INCH, 0.5)
    write_title(figure, title, about)
    add_legend(figure, {name: mark_of(name) for name in names})
    if missing:
        write_note(figure, f"{missing} numbers are not finite or do not exist and are not drawn")
    return figure


def draw_panel(
    ax: Axes, series: Mapping[str, Mapping[int, Sequence[float]]], measure: Measure
) -> None:
    """The lines of one panel."""
    set_scale(ax, measure.scale)
    for name in in_order(series):
        points = {x: finite(values) for x, values in sorted(series[name].items())}
        xs = list(points)
        if not any(points.values()):
            continue
        low, middle, high = (
            [f(values) if values else math.nan for values in points.values()]
            for f in (min, median, max)
        )
        mark = mark_of(name)
        if any(a < b for a, b in zip(low, high, strict=True)):
            ax.fill_between(xs, low, high, color=mark.colour, alpha=0.15, lw=0)
        draw_marked(ax, xs, middle, mark)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def draw_marked(ax: Axes, xs: Sequence[float], ys: Sequence[float], mark: Mark) -> None:
    """One line with its markers."""
    ax.plot(
        xs,
        ys,
        color=mark.colour,
        ls=mark.line,
        lw=1.1,
        marker=mark.marker if len(xs) <= _FEW_POINTS else "",
        ms=4,
        mfc=mark.colour if mark.filled else "white",
        mew=0.8,
        clip_on=False,
    )


def finite(values: Sequence[float]) -> list[float]:
    """The finite values."""
    return [value for value in values if math.isfinite(value)]


def set_scale(ax: Axes, scale: Scale, which: str = "y") -> None:
    """Scale and ticks of an axis."""
    axis = ax.yaxis if which == "y" else ax.xaxis
    set_it = ax.set_yscale if which == "y" else ax.set_xscale
    if scale is Scale.LOG2:
        set_it("log", base=2)
        axis.set_major_formatter(FuncFormatter(lambda value, _: power_of_two(round(log2(value)))))
    elif scale is Scale.SHARE:
        set_it("symlog", linthresh=LEAST_SHARE, linscale=0.4)
        limits = ax.set_ylim if which == "y" else ax.set_xlim
        limits(-LEAST_SHARE / 4, 1.5)
        axis.set_ticks([0, *(10.0**k for k in ((-6, -4, -2, 0) if which == "y" else (-4, -2, 0)))])
        axis.set_minor_locator(MaxNLocator(1))
        axis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    elif scale is Scale.PERCENT:
        axis.set_major_formatter(FuncFormatter(lambda value, _: percent(round(value, 6))))


def percent(share: float) -> str:
    """`0`, `0.0001 %`, `1 %`."""
    return "0" if share == 0 else f"{100 * share:.10g} %"


def write_title(figure: Figure, title: str, about: str) -> None:
    """Write the title and the subtitle."""
    width, height = figure.get_size_inches()
    x = 0.12 / width
    figure.text(x, 1 - 0.27 / height, title, fontsize=TITLE_PT + 2, fontweight="bold", color=INK)
    figure.text(x, 1 - 0.5 / height, about, fontsize=TICK_PT, color=INK)


def write_note(figure: Figure, note: str) -> None:
    """Write a line at the bottom."""
    width, height = figure.get_size_inches()
    figure.text(0.12 / width, 0.1 / height, note, fontsize=NOTE_PT, color=INK)


def legend_inch(
    width_inch: float, names: Collection[str], entry_inch: float = _LEGEND_ENTRY_INCH
) -> float:
    """The height of a legend with these entries."""
    return 0.17 * math.ceil(len(names) / max(1, int(width_inch / entry_inch)))


def add_legend(
    figure: Figure, marks: Mapping[str, Mark], entry_inch: float = _LEGEND_ENTRY_INCH
) -> None:
    """Draw the legend of the marks below the title."""
    width, height = figure.get_size_inches()
    handles = [
        Line2D(
            [],
            [],
            color=mark.colour,
            ls=mark.line,
            marker=mark.marker,
            ms=4,
            mfc=mark.colour if mark.filled else "white",
            mew=0.8,
            lw=1.1,
            label=name,
        )
        for name, mark in marks.items()
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.52 / height),
        ncols=max(1, int(width / entry_inch)),
        frameon=False,
        fontsize=TICK_PT,
        columnspacing=1.0,
        handlelength=2.2,
    )


@dataclass(frozen=True)
class Mark:
    """The style of a line or a dot."""

    colour: str
    marker: str = "o"
    #: A matplotlib marker.
    line: str | tuple[float, Dash] = "-"
    #: Whether the marker is filled.
    filled: bool = True


_TENSORS = {
    "input": Mark(SKY, "o"),
    "weight": Mark(ORANGE, "s"),
    "output": Mark(PURPLE, "d"),
    "grad_output": Mark(BLACK, "^"),
    "query": Mark(BLUE, "v"),
    "key": Mark(GREEN, "D"),
    "value": Mark(PURPLE, "X"),
    "attn_weights": Mark(VERMILLION, "P"),
    "exp_scores": Mark(PURPLE, "P"),
    "grad_scores": Mark(YELLOW, "*"),
    "main_grad": Mark(VERMILLION, "s", "--", filled=False),
    "resid_pre": Mark(SKY, "o"),
    "resid_mid": Mark(GREEN, "D"),
    "resid_post": Mark(BLUE, "v"),
}
_LINES = {"fprop": "-", "dgrad": "--", "wgrad": ":"}


def mark_of(series: str) -> Mark:
    """The mark of a slot (`fprop.x`) or of a tensor; ink for an unknown one."""
    product, _, operand = series.rpartition(".")
    tensor = source_of(tensor_called(operand) if product else series).removesuffix(SCALE)
    if tensor in _TENSORS:
        known = _TENSORS[tensor]
        line = _LINES.get(product.split("_")[0], known.line)
        return Mark(known.colour, known.marker, line, known.filled)
    of = tensor.removeprefix("grad_")
    if of in _TENSORS:
        return Mark(_TENSORS[of].colour, _TENSORS[of].marker, "--", filled=False)
    return Mark(GREY if tensor.startswith("grad") else INK)
