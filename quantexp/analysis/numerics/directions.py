"""Row-wise against column-wise blocks: the same tensor and format with blocks along each dimension of the matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from quantexp.analysis.measures.operand import Axis
from quantexp.analysis.numerics.lines import finite, write_note, write_title
from quantexp.analysis.numerics.series import Run
from quantexp.analysis.style import BLUE, INK, ORANGE, TICK_PT, dress, new_figure
from quantexp.analysis.tensors.place import in_flow

_ROW_INCH, _TOP_INCH, _BOTTOM_INCH, _LEFT_INCH = 0.24, 0.95, 0.85, 2.1


@dataclass(frozen=True)
class BothAxes:
    """One tensor in one format along both axes; SQNR in dB."""

    module: str
    tensor: str
    format: str
    rows_db: float
    columns_db: float

    @property
    def difference_db(self) -> float:
        """The advantage of columns, in dB."""
        return self.columns_db - self.rows_db


def both_axes(run: Run) -> list[BothAxes]:
    """Every tensor and block format that was judged along both dimensions."""
    pairs = []
    for one in run.tensors:
        by_format: dict[str, dict[Axis, float]] = {}
        for operand in one.operands:
            if operand.axis is not Axis.TENSOR:
                sqnr_db = operand.fidelity.sqnr_db
                by_format.setdefault(operand.format, {}).setdefault(operand.axis, sqnr_db)
        module, _, tensor = one.place.kind.partition(" ")
        pairs += [
            BothAxes(module, tensor, name, axes[Axis.ROWS], axes[Axis.COLUMNS])
            for name, axes in by_format.items()
            if len(axes) == 2
        ]
    return pairs


def rows_and_columns(run: Run) -> Figure | None:
    """A row for each tensor and format; None without a block format."""
    judged = both_axes(run)
    formats = list(dict.fromkeys(one.format for one in judged))
    if not formats:
        return None
    names = [
        (fmt, module, tensor)
        for fmt in formats
        for module in in_flow(one.module for one in judged)
        for tensor in dict.fromkeys(
            one.tensor for one in judged if (one.format, one.module) == (fmt, module)
        )
    ]
    height = _TOP_INCH + _ROW_INCH * len(names) + _BOTTOM_INCH
    width = 9.5
    figure = new_figure(width, height)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.5, 1])
    figure.subplots_adjust(
        left=_LEFT_INCH / width,
        right=1 - 0.25 / width,
        top=1 - _TOP_INCH / height,
        bottom=_BOTTOM_INCH / height,
        wspace=0.06,
    )
    dress(left, "", "SQNR (dB)", "", grid="both")
    dress(right, "", "columns - rows (dB)", "", grid="both")
    for y, name in enumerate(names):
        _draw_row(left, right, y, [o for o in judged if (o.format, o.module, o.tensor) == name])
        if y and name[:2] != names[y - 1][:2]:
            for ax in (left, right):
                ax.axhline(y - 0.5, color=INK if name[0] != names[y - 1][0] else "#BBBBBB", lw=0.8)
    several = len(formats) > 1
    labels = [f"{f.split('_')[0] + ' ' if several else ''}{m} {t}" for f, m, t in names]
    left.set_yticks(range(len(names)), labels, fontsize=TICK_PT)
    left.set_ylim(len(names) - 0.4, -0.6)
    right.axvline(0, color=INK, lw=0.9)
    reach = max([0.5, *(abs(d) for d in finite([o.difference_db for o in judged]))])
    right.set_xlim(-1.1 * reach, 1.1 * reach)
    write_title(figure, f"Row-wise against column-wise: {run.label}", ", ".join(formats))
    figure.legend(
        handles=[
            Line2D(
                [], [], color=BLUE, marker="o", ls="", label="rows: blocks along the last dimension"
            ),
            Line2D(
                [],
                [],
                color=ORANGE,
                marker="s",
                ls="",
                label="columns: along tokens, output width or queries",
            ),
        ],
        loc="upper left",
        bbox_to_anchor=(0, 1 - 0.52 / height),
        ncols=2,
        frameon=False,
        fontsize=TICK_PT,
    )
    write_note(figure, _note(judged))
    return figure


def _draw_row(left, right, y: int, same: Sequence[BothAxes]) -> None:  # type: ignore[no-untyped-def]
    for offset, colour, marker, values in (
        (-0.16, BLUE, "o", finite([one.rows_db for one in same])),
        (0.16, ORANGE, "s", finite([one.columns_db for one in same])),
    ):
        left.plot(
            values, [y + offset] * len(values), marker, color=colour, ms=2.5, alpha=0.35, mew=0
        )
        if values:
            left.plot([median(values)], [y + offset], marker, color=colour, ms=5, mew=0)
    differences = finite([one.difference_db for one in same])
    right.plot(differences, [y] * len(differences), "o", color=INK, ms=2.5, alpha=0.35, mew=0)
    if differences:
        right.barh(y, median(differences), height=0.5, color="#BBBBBB")
        right.plot([median(differences)], [y], "o", color=INK, ms=5, mew=0)


def _note(judged: Sequence[BothAxes]) -> str:
    words = (
        "small: each layer, iteration and rank; large: their median; right of 0 columns lose less"
    )
    odd = sum(not math.isfinite(one.difference_db) for one in judged)
    return words + (f"; {odd} without a finite SQNR along both are not drawn" if odd else "")
