"""Several runs at a glance: losses, gaps to the baseline, and what each scheme leaves of each kind of tensor.

A row and a line are one scheme, with runs that differ by their seed alone together (`quantexp.analysis.compare.lines`).
A number is the median over the operands that the scheme declares quantised; a kind that it leaves in the working
precision has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from quantexp.analysis.compare.comparison import compare
from quantexp.analysis.compare.curves import draw_band
from quantexp.analysis.compare.lines import NOTHING, Band, Line, lines_of
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.draw.chapter import Source
from quantexp.analysis.draw.source import open_sources
from quantexp.analysis.draw.tree import QUICK
from quantexp.analysis.numerics.lines import percent
from quantexp.analysis.quick.first_look import FirstLook, Look, first_look
from quantexp.analysis.scheme_style import SchemeStyle, scheme_styles
from quantexp.analysis.style import (
    GREY,
    INK,
    LABEL_PT,
    NOTE_PT,
    TICK_PT,
    TITLE_PT,
    Page,
    dress,
    name_lines,
    new_figure,
    save_figure,
    save_png,
)
from quantexp.analysis.tensors.by_kind import OfKind, by_kind
from quantexp.analysis.tensors.inventory import Kind

_WIDTH_INCH = 9.0
_EDGE_INCH, _TITLE_INCH, _BETWEEN_INCH, _FOOT_INCH = 0.12, 0.8, 0.9, 0.55
_NOTE_INCH = 0.17
_LINES_LEFT_INCH, _LINES_INCH, _ROW_INCH, _LETTER_INCH, _MOST_LABEL_INCH = (
    0.8,
    2.2,
    0.27,
    0.078,
    3.0,
)
_KINDS = (Kind.ACTIVATION, Kind.WEIGHT, Kind.ATTENTION, Kind.PROBABILITY, Kind.GRADIENT)
_SHORT = {
    Kind.ACTIVATION: "activ.",
    Kind.WEIGHT: "weights",
    Kind.ATTENTION: "q, k, v",
    Kind.PROBABILITY: "P",
    Kind.GRADIENT: "grad.",
}
_GAP_INCH = 0.2
#: Of one name at the end of a line, with the space to the next.
_NAME_INCH = 1.35 * TICK_PT / 72
_NO_SQNR = "no SQNR: capture.format=mxfp8 or capture=tensors adds it"
_NO_NUMBER = "#EFEFEF"
#: Shares are coloured from here to 1.
_LEAST_SHARE = 1e-6
_LEAST_SPAN_DB = 3.0


@dataclass(frozen=True)
class Scheme:
    """One line and one row."""

    label: str
    style: SchemeStyle
    kinds: tuple[OfKind, ...]
    losses: Band = NOTHING
    gaps: Band = NOTHING
    is_baseline: bool = False


@dataclass(frozen=True)
class _Table:
    title: str
    unit: str
    of: Callable[[OfKind], Sequence[float]]
    write: Callable[[float], str]
    #: The number as it is coloured, larger being better.
    rank: Callable[[float], float]
    #: What colours reach from and to; None is what occurs, at least 3 dB.
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

_TABLES = (
    _Table(
        "SQNR",
        "dB",
        lambda one: one.sqnr_db,
        lambda value: f"{value:.1f}",
        lambda value: value,
        None,
    ),
    _Table(
        "Became zero",
        "share",
        lambda one: one.underflow,
        lambda value: _short_share(value),
        _digits,
        _SHARE_SPAN,
    ),
    _Table(
        "Saturated",
        "share",
        lambda one: one.saturated,
        lambda value: _short_share(value),
        _digits,
        _SHARE_SPAN,
    ),
)


def save_overview(
    sources: Sequence[Source], looks: Sequence[FirstLook], stem: Path, formats: Sequence[str]
) -> list[Path]:
    """Draw several sources together."""
    return save_figure(draw_overview(*schemes_of(sources, looks)).figure, stem, formats)


def draw_sweep(listing: Path, out: Path) -> Path:
    """Draw the runs of a sweep's list to a PNG, by what the picture of each run has found.

    Raises:
        CaptureError: none of its runs has a folder yet.
        RunError: a list, or a run's configuration, that cannot be read.
    """
    sources = open_sources([str(listing)], {})
    keeps = [source.run.figures / f"{QUICK}.json" for source in sources if source.run is not None]
    looks = [first_look(s.capture, keep) for s, keep in zip(sources, keeps, strict=True)]
    return save_png(draw_overview(*schemes_of(sources, looks)).figure, out)


def schemes_of(
    sources: Sequence[Source], looks: Sequence[FirstLook]
) -> tuple[list[Scheme], list[str]]:
    """Sources that are runs by their lines, in the order given, then bare folders; and what to know of their gaps."""
    runs = [i for i, source in enumerate(sources) if source.run is not None]
    bare = [i for i, source in enumerate(sources) if source.run is None]
    lines: list[Line] = []
    notes: list[str] = []
    if runs:
        sides = [read_side(run) for i in runs if (run := sources[i].run) is not None]
        comparison = compare(sides)
        lines = lines_of(comparison)
        notes.append(comparison.noise)
        unmatched = [row.label for row in comparison.rows if not row.matched]
        if unmatched:
            more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
            notes.append(
                f"no matched pair with the baseline, see quantexp compare: {', '.join(unmatched[:3])}{more}"
            )
    found = [
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
        found.append(Scheme(sources[i].label, style, tuple(_declared(looks[i]))))
    return found, notes


def _declared(*looks: FirstLook) -> list[OfKind]:
    """The kinds of tensor with those operands alone that the run quantised, in the formats that it declared.

    Of statistics, what `capture.format` judged in another format says nothing of the scheme.
    """
    tensors = [look for one in looks for look in one.tensors]
    if not any(look.scales for look in tensors):
        return []
    return by_kind(FirstLook(tuple(map(_with_declared, tensors))))


def _with_declared(look: Look) -> Look:
    operands = (o for o in look.measured.operands if o.declared or o.format in look.scales)
    return replace(look, measured=replace(look.measured, operands=tuple(operands)))


def draw_overview(schemes: Sequence[Scheme], notes: Sequence[str] = ()) -> Page:
    """The figure; without losses, or without judged operands, their panels are left out."""
    with_loss = [scheme for scheme in schemes if scheme.losses.iterations]
    with_gap = [scheme for scheme in schemes if scheme.gaps.iterations]
    kinds = [
        k for k in _KINDS if any(one.kind is k and one.sqnr_db for s in schemes for one in s.kinds)
    ]
    rows = [scheme for scheme in schemes if any(one.sqnr_db for one in scheme.kinds)]
    if not rows and any(scheme.kinds for scheme in schemes):
        notes = [*notes, _NO_SQNR]
    label_inch = _label_inch([scheme.label for scheme in schemes])
    table_inch = _ROW_INCH * len(rows)
    loss_inch, gap_inch = _lines_inch(with_loss), _lines_inch(with_gap)
    heights = [inch for inch, some in ((loss_inch, with_loss), (gap_inch, with_gap)) if some]
    heights += [table_inch] if rows else []
    height = _TITLE_INCH + sum(heights) + _BETWEEN_INCH * max(0, len(heights) - 1)
    height += _FOOT_INCH + _NOTE_INCH * len(notes)
    page = Page(new_figure(_WIDTH_INCH, height))
    plural = "" if len(schemes) == 1 else "s"
    title = f"{len(schemes)} scheme{plural} at a glance"
    page.write(_EDGE_INCH, height - 0.16, title, TITLE_PT + 2, bold=True)
    top, letters = height - _TITLE_INCH, iter("abcdef")
    x, wide = _LINES_LEFT_INCH, _WIDTH_INCH - _LINES_LEFT_INCH - label_inch
    if with_loss:
        ax = page.axes(x, top - loss_inch, wide, loss_inch)
        dress(ax, f"{next(letters)}  Training loss", "iteration", "nats/token", grid="both")
        _draw_lines(ax, with_loss, [scheme.losses for scheme in with_loss])
        top -= loss_inch + _BETWEEN_INCH
    if with_gap:
        ax = page.axes(x, top - gap_inch, wide, gap_inch)
        title = f"{next(letters)}  Gap to the baseline, paired by iteration"
        dress(ax, title, "iteration", "nats/token", grid="both")
        ax.axhline(0, color=GREY, lw=1.2)
        _draw_lines(ax, with_gap, [scheme.gaps for scheme in with_gap])
        top -= gap_inch + _BETWEEN_INCH
    if rows:
        _draw_tables(page, rows, kinds, top - table_inch, label_inch, letters)
    for i, note in enumerate(notes):
        page.write(_EDGE_INCH, _NOTE_INCH * (len(notes) - i) + 0.04, note, TICK_PT)
    if not rows and not with_loss:
        page.write(_EDGE_INCH, height - 0.5, "no run has a loss or a judged operand", LABEL_PT)
    return page


def _lines_inch(schemes: Sequence[Scheme]) -> float:
    """The height of a panel of lines: the names at their ends need room."""
    return max(_LINES_INCH, _NAME_INCH * len(schemes))


def _label_inch(labels: Sequence[str]) -> float:
    return min(_MOST_LABEL_INCH, 0.55 + _LETTER_INCH * max(map(len, labels), default=0))


def _draw_lines(ax: Axes, schemes: Sequence[Scheme], bands: Sequence[Band]) -> None:
    ends = []
    for scheme, band in zip(schemes, bands, strict=True):
        end = draw_band(ax, band, scheme.style, is_baseline=scheme.is_baseline)
        ends.append((*end, scheme.label, scheme.style))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    name_lines(ax, ends)


def _draw_tables(
    page: Page,
    rows: Sequence[Scheme],
    kinds: Sequence[Kind],
    y: float,
    label_inch: float,
    letters: Iterator[str],
) -> None:
    wide = (_WIDTH_INCH - label_inch - 0.15 - 2 * _GAP_INCH) / 3
    for number, table in enumerate(_TABLES):
        x = label_inch + number * (wide + _GAP_INCH)
        ax = page.axes(x, y, wide, _ROW_INCH * len(rows))
        title = f"{next(letters)}  {table.title} ({table.unit})"
        draw_table(ax, rows, kinds, table, title, with_names=number == 0)


def draw_table(
    ax: Axes,
    schemes: Sequence[Scheme],
    kinds: Sequence[Kind],
    table: _Table,
    title: str,
    *,
    with_names: bool,
) -> None:
    """A cell for each scheme and kind, with its number."""
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


def _value(scheme: Scheme, kind: Kind, table: _Table) -> float:
    """The median over the operands of the kind; NaN where none is quantised."""
    values = [v for one in scheme.kinds if one.kind is kind for v in table.of(one)]
    return median(values) if values else math.nan


def _short_share(value: float) -> str:
    """`0`, `2 %`, `0.03 %`, `1e-5`."""
    if 0 < value < 1e-4:
        return f"{value:.0e}".replace("e-0", "e-")
    return percent(float(f"{value:.2g}"))
