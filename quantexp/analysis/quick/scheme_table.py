"""Runs as the schemes they train, and tables of schemes by kind of tensor: SQNR, share that became zero or saturated.

Runs that differ by their seed alone are one scheme (`quantexp.analysis.compare.lines`). A number is the median over the
operands that the scheme declares quantised; a kind that it leaves in the working precision has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from quantexp.analysis.chapter import Source
from quantexp.analysis.compare.comparison import compare
from quantexp.analysis.compare.lines import NOTHING, Band, Line, lines_of
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.compare.verdicts import judge
from quantexp.analysis.numerics.lines import percent
from quantexp.analysis.quick.by_kind import OfKind, by_kind
from quantexp.analysis.quick.first_look import FirstLook, Look
from quantexp.analysis.scheme_style import SchemeStyle, scheme_styles
from quantexp.analysis.style import INK, NOTE_PT, TICK_PT, dress
from quantexp.analysis.tensors.place import Kind

_SHORT = {
    Kind.ACTIVATION: "activ.",
    Kind.WEIGHT: "weights",
    Kind.ATTENTION: "q, k, v",
    Kind.PROBABILITY: "P",
    Kind.GRADIENT: "grad.",
}
_NO_NUMBER = "#EFEFEF"
#: Shares are coloured from here to 1.
_LEAST_SHARE = 1e-6
_LEAST_SPAN_DB = 3.0


@dataclass(frozen=True)
class SchemeTable:
    """One number of every scheme and kind."""

    title: str
    unit: str
    of: Callable[[OfKind], Sequence[float]]
    write: Callable[[float], str]
    #: Maps a number to its colour value, larger being better.
    rank: Callable[[float], float]
    #: The range of the colour scale; None means the range of the numbers, at least 3 dB.
    span: tuple[float, float] | None


def _decibel_span(values: np.ndarray) -> tuple[float, float]:
    """What occurs, at least 3 dB."""
    if not values.size:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    return (low, high) if high - low >= _LEAST_SPAN_DB else (high - _LEAST_SPAN_DB, high)


def _digits(share: float) -> float:
    return -math.log10(max(share, _LEAST_SHARE))


#: From all elements to one in a million.
_SHARE_SPAN = (0.0, _digits(0.0))

TABLES = (
    SchemeTable(
        "SQNR",
        "dB",
        lambda one: one.sqnr_db,
        lambda value: f"{value:.1f}",
        lambda value: value,
        None,
    ),
    SchemeTable(
        "Became zero",
        "share",
        lambda one: one.underflow,
        lambda value: _short_share(value),
        _digits,
        _SHARE_SPAN,
    ),
    SchemeTable(
        "Saturated",
        "share",
        lambda one: one.saturated,
        lambda value: _short_share(value),
        _digits,
        _SHARE_SPAN,
    ),
)


def draw_table(
    ax: Axes,
    schemes: Sequence[Scheme],
    kinds: Sequence[Kind],
    table: SchemeTable,
    title: str,
    *,
    with_names: bool,
) -> None:
    """Draw a cell with its number for each scheme and kind."""
    values = np.array([[_value(scheme, kind, table) for kind in kinds] for scheme in schemes])
    ranks = np.vectorize(lambda v: math.nan if math.isnan(v) else table.rank(v), otypes=[float])(
        values
    )
    finite = ranks[np.isfinite(ranks)]
    low, high = table.span or _decibel_span(finite)
    colours = colormaps["viridis"].with_extremes(bad=_NO_NUMBER)
    ax.imshow(
        np.ma.masked_invalid(np.clip(ranks, low, high)),
        cmap=colours,
        vmin=low,
        vmax=high,
        aspect="auto",
    )
    dress(ax, title, "", "", grid="x")
    ax.grid(visible=False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.tick_params(length=0)
    ax.set_xticks(range(len(kinds)), [_SHORT[kind] for kind in kinds], fontsize=TICK_PT)
    names = [scheme.label for scheme in schemes] if with_names else [""] * len(schemes)
    ax.set_yticks(range(len(schemes)), names, fontsize=TICK_PT)
    for row in range(1, len(schemes)):
        ax.axhline(row - 0.5, color="white", lw=1.5)
    for (row, column), value in np.ndenumerate(values):
        if math.isnan(value):
            continue
        share = (np.clip(ranks[row, column], low, high) - low) / (high - low)
        red, green, blue, _ = colours(share)
        is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        ax.text(
            column,
            row,
            table.write(value),
            ha="center",
            va="center",
            fontsize=NOTE_PT + 0.5,
            color="white" if is_dark else INK,
        )


def _value(scheme: Scheme, kind: Kind, table: SchemeTable) -> float:
    """The median over the operands of the kind; NaN if none is quantised."""
    values = [v for one in scheme.kinds if one.kind is kind for v in table.of(one)]
    return median(values) if values else math.nan


def _short_share(value: float) -> str:
    """`0`, `2 %`, `0.03 %`, `1e-5`."""
    if 0 < value < 1e-4:
        return f"{value:.0e}".replace("e-0", "e-")
    return percent(float(f"{value:.2g}"))


@dataclass(frozen=True)
class Scheme:
    """One line and one row."""

    label: str
    style: SchemeStyle
    kinds: tuple[OfKind, ...]
    losses: Band = NOTHING
    gaps: Band = NOTHING
    is_baseline: bool = False


def schemes_of(
    sources: Sequence[Source], looks: Sequence[FirstLook]
) -> tuple[list[Scheme], list[str]]:
    """The schemes of the sources, runs first, then bare folders; and notes about their gaps."""
    runs = [i for i, source in enumerate(sources) if source.run is not None]
    bare = [i for i, source in enumerate(sources) if source.run is None]
    lines: list[Line] = []
    notes: list[str] = []
    if runs:
        sides = [read_side(run) for i in runs if (run := sources[i].run) is not None]
        comparison = compare(sides)
        lines = lines_of(comparison)
        notes.append(judge(comparison).noise)
        unmatched = [row.label for row in comparison.rows if not row.matched]
        if unmatched:
            more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
            notes.append(
                f"no matched pair with the baseline, see quantexp compare: {', '.join(unmatched[:3])}{more}"
            )
    drawn = [
        Scheme(
            line.label,
            line.style,
            tuple(_declared(*(looks[runs[row]] for row in line.rows))),
            line.losses,
            line.gaps,
            line.is_baseline,
        )
        for line in lines
    ]
    styles = scheme_styles([sources[i].scheme for i in bare])
    for i, style in zip(bare, styles, strict=True):
        drawn.append(Scheme(sources[i].label, style, tuple(_declared(looks[i]))))
    return drawn, notes


def _declared(*looks: FirstLook) -> list[OfKind]:
    """The kinds of tensor with only the quantised operands of the run, in their declared formats.

    Of statistics, what `capture.format` judged in another format says nothing of the scheme.
    """
    tensors = [look for one in looks for look in one.tensors]
    if not any(look.scales for look in tensors):
        return []
    return by_kind(FirstLook(tuple(map(_with_declared, tensors))))


def _with_declared(look: Look) -> Look:
    operands = (o for o in look.measured.operands if o.declared or o.format in look.scales)
    return replace(look, measured=replace(look.measured, operands=tuple(operands)))
