"""An overview of several runs: losses, gaps to the baseline, and fidelity of each scheme for each kind of tensor.

A row and a line are one scheme, with runs that differ by their seed alone together (`quantexp.analysis.compare.lines`).
A number is the median over the operands that the scheme declares quantised; a kind that it leaves in the working
precision has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from quantexp.analysis.chapter import Source
from quantexp.analysis.compare.curves import draw_band
from quantexp.analysis.compare.lines import Band
from quantexp.analysis.quick.first_look import FirstLook
from quantexp.analysis.quick.scheme_table import TABLES, Scheme, draw_table, schemes_of
from quantexp.analysis.style import (
    GREY,
    LABEL_PT,
    TICK_PT,
    TITLE_PT,
    Page,
    dress,
    name_lines,
    new_figure,
    save_figure,
)
from quantexp.analysis.tensors.place import Kind

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
_GAP_INCH = 0.2
#: The height of a name at the end of a line, with the space to the next.
_NAME_INCH = 1.35 * TICK_PT / 72
_NO_SQNR = "no SQNR: capture.format=mxfp8 or capture=tensors adds it"


def save_overview(
    sources: Sequence[Source], looks: Sequence[FirstLook], stem: Path, formats: Sequence[str]
) -> list[Path]:
    """Draw several sources together."""
    return save_figure(draw_overview(*schemes_of(sources, looks)).figure, stem, formats)


def draw_overview(schemes: Sequence[Scheme], notes: Sequence[str] = ()) -> Page:
    """The figure, without the panels of missing losses or judged operands."""
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
    """The height of a panel of lines, which must fit the names at their ends."""
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
    for number, table in enumerate(TABLES):
        x = label_inch + number * (wide + _GAP_INCH)
        ax = page.axes(x, y, wide, _ROW_INCH * len(rows))
        title = f"{next(letters)}  {table.title} ({table.unit})"
        draw_table(ax, rows, kinds, table, title, with_names=number == 0)
