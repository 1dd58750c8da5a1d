"""Forward against backward: tensors with their gradients, and operands of forward and backward products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from quantexp.analysis.measures.measured import Measured
from quantexp.analysis.numerics.by_layer import about_group
from quantexp.analysis.numerics.lines import LEAST_SHARE, finite, set_scale, write_note, write_title
from quantexp.analysis.numerics.series import (
    AMAX,
    KURTOSIS,
    SQNR,
    STD,
    UNDERFLOW,
    Judged,
    Measure,
    Run,
    Scale,
    modules_of,
    tensor_value,
)
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
    dress,
    new_figure,
    say_instead,
)
from quantexp.analysis.tensors.place import experts_as_one, in_flow

_COLOURS = (SKY, ORANGE, GREEN, BLUE, PURPLE, VERMILLION, GREY, BLACK)
_MARKERS = ("o", "s", "D", "v", "X", "P", "^", "*")
_GRADIENT = "grad_"
#: More dots of a kind are rasterised in PDF and SVG too.
MANY = 2000
#: Series of backward products.
_BACKWARD_COLOUR, _FORWARD_COLOUR = VERMILLION, BLUE


@dataclass(frozen=True)
class Pair:
    """A tensor and its gradient, of the same module, layer, iteration, micro-batch and rank."""

    tensor: Measured
    gradient: Measured


def pairs(tensors: Iterable[Measured]) -> list[Pair]:
    """Every tensor with a captured gradient; a weight occurs once."""
    first: dict[tuple[object, ...], Measured] = {}
    for one in tensors:
        first.setdefault(_key(one, one.place.tensor), one)
    return [
        Pair(partner, one)
        for one in first.values()
        if one.place.tensor.startswith(_GRADIENT)
        and (partner := first.get(_key(one, one.place.tensor.removeprefix(_GRADIENT))))
    ]


def _key(one: Measured, tensor: str) -> tuple[object, ...]:
    place = one.place
    return (place.module, place.layer, place.iteration, place.micro_batch, place.rank, tensor)


def forward_and_backward(run: Run, group: str, judged: Sequence[Judged]) -> Figure | None:
    """Five panels; None without captures of the backward pass."""
    paired = pairs(run.tensors)
    if not paired:
        return None
    width, height = 11.5, 7.0
    figure = new_figure(width, height)
    upper = figure.add_gridspec(1, 3, left=0.07, right=0.985, top=0.845, bottom=0.52, wspace=0.3)
    lower = figure.add_gridspec(1, 2, left=0.07, right=0.985, top=0.4, bottom=0.1, wspace=0.24)
    modules = in_flow(experts_as_one(p.tensor.place.module) for p in paired)
    marks = {
        module: (_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)])
        for i, module in enumerate(modules)
    }
    missing = 0
    for place, measure in enumerate((STD, AMAX, KURTOSIS)):
        missing += _draw_pairs(figure.add_subplot(upper[place]), paired, measure, marks)
    for place, measure in enumerate((SQNR, UNDERFLOW)):
        missing += _draw_products(figure.add_subplot(lower[place]), judged, measure)
    write_title(figure, f"Forward against backward: {run.label}", about_group(run, group))
    figure.legend(
        handles=[
            Line2D([], [], color=colour, marker=marker, ls="", ms=5, mew=0, label=module)
            for module, (colour, marker) in marks.items()
        ],
        loc="upper left",
        bbox_to_anchor=(0, 1 - 0.52 / height),
        ncols=8,
        frameon=False,
        fontsize=TICK_PT,
    )
    lines = (
        "above: a dot is a tensor and its gradient (dashed: equal); "
        "below: a dot is an operand of a forward (blue) or backward (red) product"
    )
    more = f"; {missing} without a finite, positive number are not drawn" if missing else ""
    write_note(figure, lines + more)
    return figure


def _draw_pairs(
    ax: Axes, paired: Sequence[Pair], measure: Measure, marks: dict[str, tuple[str, str]]
) -> int:
    """Draw one dot for each pair on logarithmic axes; returns the number of pairs that cannot be drawn."""
    dress(ax, "", f"{measure.label}, tensor", f"{measure.label}, gradient", grid="both")
    set_scale(ax, Scale.LOG2, "x")
    set_scale(ax, Scale.LOG2, "y")
    missing = 0
    points: dict[str, tuple[list[float], list[float]]] = {}
    for pair in paired:
        x, y = tensor_value(pair.tensor, measure), tensor_value(pair.gradient, measure)
        if not (math.isfinite(x) and math.isfinite(y) and x > 0 and y > 0):
            missing += 1
            continue
        xs, ys = points.setdefault(experts_as_one(pair.tensor.place.module), ([], []))
        xs.append(x)
        ys.append(y)
    for module, (xs, ys) in points.items():
        colour, marker = marks[module]
        many = len(xs) > MANY
        ax.plot(xs, ys, marker, color=colour, ms=4.5, mew=0, alpha=0.8, rasterized=many)
    if points and measure is KURTOSIS:
        ax.axline((1, 1), (2, 2), color=INK, lw=0.8, ls="--")
    return missing


def _draw_products(ax: Axes, judged: Sequence[Judged], measure: Measure) -> int:
    """Draw operands of forward products on the left and of backward products on the right, for each module."""
    dress(ax, "", "", measure.label)
    if not judged:
        say_instead(ax, "no operand was judged")
        return 0
    set_scale(ax, measure.scale)
    modules = modules_of(judged)
    missing = 0
    for column, module in enumerate(modules):
        for side, colour, wanted in ((-0.2, _FORWARD_COLOUR, True), (0.2, _BACKWARD_COLOUR, False)):
            values = [
                getattr(j.operand.fidelity, measure.name)
                for j in judged
                if j.module == module and is_forward(j) == wanted
            ]
            kept = finite(values)
            missing += len(values) - len(kept)
            spread = np.linspace(-0.12, 0.12, len(kept)) if len(kept) > 1 else np.zeros(len(kept))
            ax.plot(
                column + side + spread,
                kept,
                "o",
                color=colour,
                ms=3.5,
                mew=0,
                alpha=0.7,
                rasterized=len(kept) > MANY,
            )
            if kept:
                ax.hlines(
                    float(np.median(kept)),
                    column + side - 0.17,
                    column + side + 0.17,
                    color=INK,
                    lw=1.2,
                )
    ax.set_xticks(range(len(modules)), modules)
    ax.set_xlim(-0.6, len(modules) - 0.4)
    if measure.scale is Scale.SHARE:
        ax.set_ylim(-LEAST_SHARE / 4, 1.5)
    return missing


def is_forward(judged: Judged) -> bool:
    """Whether the operand belongs to a forward product; for statistics, whether its tensor is of the forward pass."""
    product = judged.series.rpartition(".")[0]
    return product == "fprop" if product else judged.place.operation == "forward"
