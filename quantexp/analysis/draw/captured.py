"""The content of a capture: tensors and bytes by quantisation type, layer type, operation and module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from quantexp.analysis.draw.tables import CLASSES, Row, counted_by
from quantexp.analysis.style import (
    INK,
    KIND_COLOURS,
    NOTE_PT,
    TICK_PT,
    Page,
    dress,
    new_figure,
    save_figure,
)
from quantexp.analysis.tensors.place import Kind, in_flow, kind_of
from quantexp.terminal.units import human_bytes

FILE_NAME = "captured"
_WIDTH_INCH, _ROW_INCH, _BETWEEN_INCH = 9.0, 0.27, 0.85
_LEFT_INCH, _RIGHT_INCH, _TOP_INCH, _BOTTOM_INCH = 1.5, 1.7, 0.75, 0.5


def save_captured(rows: Sequence[Row], stem: Path, formats: Sequence[str]) -> list[Path]:
    """Save the figure and return its files; none without tensors."""
    return save_figure(draw_captured(rows).figure, stem, formats) if rows else []


def draw_captured(rows: Sequence[Row]) -> Page:
    """Draw a panel for each class, with a bar for each of its values, stacked by kind of tensor."""
    panels = {title: counted_by(rows, key) for title, key in CLASSES.items()}
    number = sum(len(values) for values in panels.values())
    height = _TOP_INCH + _ROW_INCH * number + _BETWEEN_INCH * (len(panels) - 1) + _BOTTOM_INCH
    page = Page(new_figure(_WIDTH_INCH, height))
    is_bytes = any(_bytes(row) for row in rows)
    what = "bytes" if is_bytes else "tensors"
    top = height - _TOP_INCH
    for letter, (title, values) in zip("abcd", panels.items(), strict=True):
        tall = _ROW_INCH * len(values)
        ax = page.axes(_LEFT_INCH, top - tall, _WIDTH_INCH - _LEFT_INCH - _RIGHT_INCH, tall)
        names = in_flow(values) if title == "module" else sorted(values)
        dress(ax, f"{letter}  Captured by {title}, share of {what}", "", "", grid="x")
        _draw_bars(ax, {name: values[name] for name in names}, is_bytes=is_bytes)
        top -= tall + _BETWEEN_INCH
    _explain_colours(page, rows)
    return page


def _draw_bars(ax: Axes, values: Mapping[str, Sequence[Row]], *, is_bytes: bool) -> None:
    weigh: Callable[[Row], int] = _bytes if is_bytes else lambda row: 1
    total = sum(weigh(row) for members in values.values() for row in members) or 1
    for y, members in enumerate(values.values()):
        left = 0.0
        for kind in Kind:
            width = sum(weigh(row) for row in members if _kind(row) is kind) / total
            if width:
                ax.barh(y, width, left=left, height=0.7, color=KIND_COLOURS[kind])
            left += width
        sizes = human_bytes(sum(map(_bytes, members)))
        words = f" {left:.1%}, {len(members)} tensors" + (f", {sizes}" if is_bytes else "")
        ax.text(left, y, words, va="center", fontsize=NOTE_PT, color=INK)
    ax.set_yticks(range(len(values)), list(values), fontsize=TICK_PT)
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(PercentFormatter(1, 0))


def _explain_colours(page: Page, rows: Sequence[Row]) -> None:
    present = {_kind(row) for row in rows}
    handles = [Patch(color=KIND_COLOURS[k], label=k.value) for k in Kind if k in present]
    page.figure.legend(handles=handles, loc="upper left", ncols=6, frameon=False, fontsize=TICK_PT)


def _kind(row: Row) -> Kind:
    return kind_of(str(row.entry.metadata.get("tensor")))


def _bytes(row: Row) -> int:
    return int(row.entry.metadata.get("bytes") or 0)
