"""The panel of quantisation error: SQNR of every quantised operand under its declared format.

One column for each operand of each matrix product of each module, in it a dot for each tensor
(layer, iteration, rank) in the colour of its format, and a bar at their median.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes

from quantexp.analysis.inventory import in_flow
from quantexp.analysis.panels import NO_TENSORS
from quantexp.analysis.style import (
    BLACK,
    INK,
    NOTE_PT,
    TICK_PT,
    dress,
    quant_colour,
    say_instead,
)
from quantexp.analysis.survey import OperandFidelity

#: (module, slot).
Column = tuple[str, str]

_MIN_HEIGHT_DB = 6.0
#: The left operand before the right one.
_OPERANDS = ("x", "g", "w", "q", "dS", "k", "P", "dO", "v")


def draw_fidelity(ax: Axes, operands: Sequence[OperandFidelity], *, captured: bool) -> None:
    """Draw the panel; an SQNR that is not finite has no dot, its column stays."""
    x_label = "operand and matrix product (dot: a tensor, bar: their median)"
    dress(ax, "e  Quantisation error", x_label, "SQNR (dB)")
    columns = _columns(operands)
    if not columns:
        say_instead(ax, "no quantised operand" if captured else NO_TENSORS)
        return
    _name_columns(ax, list(columns))
    finite = {
        place: [m for m in members if math.isfinite(m.fidelity.sqnr_db)]
        for place, members in enumerate(columns.values())
    }
    finite = {place: members for place, members in finite.items() if members}
    if finite:
        _draw_dots(ax, finite)
        _draw_medians(ax, finite)
        _keep_in_proportion(ax, [m.fidelity.sqnr_db for ms in finite.values() for m in ms])


def _columns(operands: Sequence[OperandFidelity]) -> dict[Column, list[OperandFidelity]]:
    """(module, slot) -> its layers; modules as in the forward pass, fprop first."""
    modules = in_flow(o.module for o in operands)
    ordered = sorted(
        operands,
        key=lambda o: (
            modules.index(o.module),
            o.declared.product != "fprop",
            o.declared.product,
            _OPERANDS.index(o.declared.operand),
            o.layer,
        ),
    )
    columns: dict[Column, list[OperandFidelity]] = {}
    for one in ordered:
        columns.setdefault((one.module, one.declared.slot), []).append(one)
    return columns


def _draw_dots(ax: Axes, columns: Mapping[int, Sequence[OperandFidelity]]) -> None:
    """The members of a column side by side, so that equal values show as many dots."""
    points: dict[str, list[tuple[float, float]]] = {}
    for column, members in columns.items():
        for place, member in enumerate(members):
            x = column + 0.5 * ((place + 0.5) / len(members) - 0.5)
            points.setdefault(member.declared.name, []).append((x, member.fidelity.sqnr_db))
    for name, xy in points.items():
        xs, ys = zip(*xy, strict=True)
        ax.plot(xs, ys, "o", ms=4, mew=0, color=quant_colour(name), label=name)
    ax.legend(
        fontsize=NOTE_PT,
        frameon=False,
        loc="lower right",
        ncols=3,
        bbox_to_anchor=(1.01, 0.98),
        columnspacing=1.0,
        handletextpad=0.1,
    )


def _draw_medians(ax: Axes, columns: Mapping[int, Sequence[OperandFidelity]]) -> None:
    middles = [median(m.fidelity.sqnr_db for m in members) for members in columns.values()]
    left, right = ([column + side for column in columns] for side in (-0.35, 0.35))
    ax.hlines(middles, left, right, color=BLACK, lw=1.2)


def _keep_in_proportion(ax: Axes, values_db: Sequence[float]) -> None:
    """At least 6 dB of height, so that a tenth of a decibel looks as small as it is."""
    middle = (min(values_db) + max(values_db)) / 2
    reach = max(_MIN_HEIGHT_DB / 2, 0.66 * (max(values_db) - min(values_db)))
    ax.set_ylim(middle - reach, middle + reach)


def _name_columns(ax: Axes, columns: Sequence[tuple[str, str]]) -> None:
    """Slots along the axis, turned, their modules on top, a line between modules."""
    size = TICK_PT if len(columns) <= 24 else NOTE_PT if len(columns) <= 48 else 5.5
    ax.set_xticks(range(len(columns)), [slot for _, slot in columns], rotation=90, fontsize=size)
    ax.set_xlim(-0.6, len(columns) - 0.4)
    modules = [module for module, _ in columns]
    for module in dict.fromkeys(modules):
        first = modules.index(module)
        last = first + modules.count(module) - 1
        if first:
            ax.axvline(first - 0.5, color="#BBBBBB", lw=0.8)
        middle = (first + last) / 2
        ax.annotate(
            module,
            (middle, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, -4),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=size,
            color=INK,
        )
