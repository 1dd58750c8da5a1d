"""A table that fits a given width: it drops columns by their worth, and breaks lines between words.

Every column has a worth, and a rule for shrinking its cells. If the columns do not fit, the table drops the column of
the least worth, then the next; columns with the worth `ALWAYS` stay. Empty columns are dropped too.

A command of quantexp is one word, so that it can be copied. It goes from `quantexp` to the first word that ends with a
bracket, comma or semicolon, or to the end of the line; a path in quotes may hold blanks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from quantexp.terminal.escaping import printable, printable_line

#: The worth of a column that is never dropped.
ALWAYS = 100
#: The minimum width of a truncated cell.
_LEAST_CUT = 12
_GAP = 2

#: The cells of a row: console markup, or `Text`.
Row = Sequence[str | Text]


class Shrink(Enum):
    """How a column shrinks cells that are too wide."""

    #: The column does not shrink.
    NEVER = auto()
    #: The cell wraps between words; a command is one word.
    WRAP = auto()
    #: As a last resort the cell loses its start, because the end of a run's name identifies it.
    CUT_START = auto()
    #: The cell loses its end.
    CUT_END = auto()


@dataclass(frozen=True)
class Column:
    """One column: heading (of several lines where it has some), worth, and how it fits."""

    heading: str = ""
    worth: int = ALWAYS
    shrink: Shrink = Shrink.NEVER
    is_number: bool = False
    #: The minimum width; for a column that shrinks, the minimum width at which it is shown.
    min_width: int = 0


@dataclass(frozen=True)
class Fitted:
    """The table, and the headings of dropped columns that had content."""

    table: FittedTable
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """The columns of a table that are shown, and their widths; tables of one layout stand below each other as one."""

    columns: Sequence[Column]
    #: The shown columns, and the width of each.
    widths: Mapping[int, int]
    #: The headings of dropped columns that had content.
    left_out: tuple[str, ...]

    @property
    def shown(self) -> set[str]:
        """The headings of the shown columns."""
        return {self.columns[i].heading for i in self.widths}

    def table(
        self, rows: Sequence[Row], title: str | None = None, *, has_headings: bool = True
    ) -> FittedTable:
        """A table of these rows; content that is too wide for its column is wrapped or cut."""
        table = FittedTable(
            box=None,
            pad_edge=False,
            padding=(0, _GAP, 0, 0),
            title=title,
            title_justify="left",
            show_header=has_headings and any(column.heading for column in self.columns),
        )
        for i, width in self.widths.items():
            column = self.columns[i]
            table.add_column(
                column.heading,
                justify="right" if column.is_number else "left",
                no_wrap=column.shrink is not Shrink.WRAP,
                overflow="fold" if column.shrink is Shrink.WRAP else "ellipsis",
                width=width,
            )
            cells = {
                key: _cut(cell, column, width) for key, cell in _distinct(rows, i, column).items()
            }
            table.cells.append([cells[_key(row[i])] for row in rows])
        return table


class FittedTable(Table):
    """A table that renders equal cells once, and pads plain ones itself; rich's own rows take many times as long."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        #: The cells of each column from top to bottom; equal ones are one object.
        self.cells: list[list[Text]] = []

    def _render(self, console: Console, options: ConsoleOptions, widths: list[int]) -> RenderResult:
        """The heading by rich, which has no rows, then the rows."""
        yield from super()._render(console, options, widths)
        rendered = []
        for i, (column, width, cells) in enumerate(
            zip(self.columns, widths, self.cells, strict=True)
        ):
            gap = _GAP if i + 1 < len(widths) else 0
            narrow = options.update(
                width=width,
                justify=column.justify,
                no_wrap=column.no_wrap,
                overflow=column.overflow,
            )
            lines = {
                id(cell): _padded(cell, column.justify == "right", width - gap, gap)
                or console.render_lines(Padding(cell, (0, gap, 0, 0)), narrow)
                for cell in {id(cell): cell for cell in cells}.values()
            }
            rendered.append([lines[id(cell)] for cell in cells])
        for row in zip(*rendered, strict=True):
            for n in range(max(map(len, row))):
                for width, lines in zip(widths, row, strict=True):
                    yield from lines[n] if n < len(lines) else (Segment(" " * width),)
                yield Segment.line()


def _padded(cell: Text, to_right: bool, width: int, gap: int) -> list[list[Segment]] | None:
    """The line of a cell without style that fits into one, as rich would render it; None for any other cell."""
    text = cell.plain.rstrip() if to_right else cell.plain
    room = width - cell_len(text)
    if room < 0 or cell.style or cell.spans or not text.isprintable():
        return None
    before = room if to_right else 0
    return [[Segment(" " * before + text + " " * (room - before + gap))]]


def fitted_table(
    columns: Sequence[Column],
    rows: Sequence[Row],
    width: int,
    title: str | None = None,
) -> Fitted:
    """A table of these rows (console markup, or `Text`), at most `width` characters wide.

    Hidden characters are shown by their codes; line feeds too, except in columns of numbers and those that wrap.
    """
    layout = layout_of(columns, rows, width)
    return Fitted(layout.table(rows, title), layout.left_out)


def layout_of(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Layout:
    """The layout of `fitted_table`, for the content of all rows that will be shown."""
    cells = [_distinct(rows, i, column).values() for i, column in enumerate(columns)]
    natural = list(map(_natural, columns, cells))
    least = list(map(_least, columns, cells, natural))
    shown = [i for i, column in enumerate(cells) if not rows or any(each.plain for each in column)]
    left_out = []
    while _sum(least, shown) > width:
        droppable = [i for i in shown if columns[i].worth < ALWAYS]
        if not droppable:
            break
        dropped = min(droppable, key=lambda i: (columns[i].worth, -i))
        shown.remove(dropped)
        left_out.append(columns[dropped].heading)
    if _sum(least, shown) > width:  # truncating names is the last resort
        names = [i for i in shown if columns[i].shrink is Shrink.CUT_START]
        least = [min(n, _LEAST_CUT) if i in names else n for i, n in enumerate(least)]
    widths = _widths(columns, least, natural, shown, width)
    return Layout(columns, widths, tuple(left_out))


def _key(content: str | Text) -> str | int:
    """What equal contents have in common; a `Text` is equal to itself alone."""
    return content if isinstance(content, str) else id(content)


def _distinct(rows: Sequence[Row], i: int, column: Column) -> dict[str | int, Text]:
    """The different cells of a column, by their keys."""
    contents = {_key(row[i]): row[i] for row in rows}
    return {key: _cell(content, column) for key, content in contents.items()}


def _cell(content: str | Text, column: Column) -> Text:
    has_lines = column.shrink is Shrink.WRAP or column.is_number
    show = printable if has_lines else printable_line
    if isinstance(content, str):
        return Text.from_markup(show(content), emoji=False)
    shown = show(content.plain)
    return content if shown == content.plain else Text(shown, content.style)


def _natural(column: Column, cells: Iterable[Text]) -> int:
    lines = [line for cell in cells for line in cell.plain.split("\n")]
    lines += column.heading.split("\n")
    widest = max(map(cell_len, lines))
    return widest if column.shrink is Shrink.CUT_START else max(widest, column.min_width)


def _least(column: Column, cells: Iterable[Text], natural: int) -> int:
    if column.shrink in (Shrink.NEVER, Shrink.CUT_START):
        return natural
    least = max(column.min_width, *map(cell_len, column.heading.split("\n")))
    if column.shrink is Shrink.WRAP:
        words = {word.rstrip() for cell in cells for word in words_of(cell.plain)}
        least = max([least, *map(cell_len, words)])
    return least


def _sum(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + _GAP * (len(shown) - 1)


def _widths(
    columns: Sequence[Column],
    least: Sequence[int],
    natural: Sequence[int],
    shown: Sequence[int],
    width: int,
) -> dict[int, int]:
    """The minimum width of each column, plus shares of the spare width for columns that need more, names first."""
    widths = {i: least[i] for i in shown}
    spare = width - _sum(least, shown)
    wanting = sorted(shown, key=lambda i: (columns[i].shrink is Shrink.WRAP, natural[i] - least[i]))
    for place, i in enumerate(wanting):
        names = columns[i].shrink in (Shrink.NEVER, Shrink.CUT_START)
        share = spare if names else spare // (len(wanting) - place)
        more = max(0, min(natural[i] - least[i], share))
        widths[i] += more
        spare -= more
    return widths


def _cut(cell: Text, column: Column, width: int) -> Text:
    if column.shrink is Shrink.WRAP and cell_len(cell.plain) > width:
        return Text("\n").join(wrapped(cell, width))
    if column.shrink is not Shrink.CUT_START or cell_len(cell.plain) <= width:
        return cell
    return Text("…").append_text(cell[len(cell) - (width - 1) :])


_WORD = re.compile(r"[(`]?quantexp(?:(?<![;,)]) (?:'[^']*'|[^\s'])+)+\s*|\S+\s*")


def words_of(line: str) -> list[str]:
    """The words of a line, each with the blanks behind it; a command is one of them."""
    return _WORD.findall(line)


def wrapped(value: Text, room: int) -> Iterator[Text]:
    """Lines of at most `room` characters, broken between words; a longer word has its own line."""
    for line in value.split(allow_blank=True):
        breaks, used, at = [], 0, len(line.plain) - len(line.plain.lstrip())
        for word in words_of(line.plain):
            if used and used + cell_len(word.rstrip()) > room:
                breaks.append(at)
                used = 0
            used += cell_len(word)
            at += len(word)
        for part in line.divide(breaks):
            part.rstrip()
            yield part
