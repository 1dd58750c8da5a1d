"""A table that fits a given width: it drops columns by their worth, and breaks lines between words.

Every column has a worth, and a rule for shrinking its cells. If the columns do not fit, the table drops the column of
the least worth, then the next; columns with the worth `ALWAYS` stay. Empty columns are dropped too.

A command of quantexp is one word, so that it can be copied. It goes from `quantexp` to the first word that ends with a
bracket, comma or semicolon, or to the end of the line; a path in quotes may hold blanks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from quantexp.terminal.escaping import printable, printable_line

#: The worth of a column that is never dropped.
ALWAYS = 100
#: The minimum width of a truncated cell.
_LEAST_CUT = 12
_GAP = 2
#: Rows of one line that are one row of rich's table, which takes much longer for a row than for a line.
_STRETCH = 100


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

    table: Table
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """The columns of a table that are shown, and their widths; tables of one layout stand below each other as one."""

    columns: Sequence[Column]
    #: The shown columns, and the width of each.
    widths: Mapping[int, int]
    #: Whether they fit; rich narrows the columns of a table that is still too wide, and may then wrap any cell.
    fits: bool
    #: The headings of dropped columns that had content.
    left_out: tuple[str, ...]

    @property
    def shown(self) -> set[str]:
        """The headings of the shown columns."""
        return {self.columns[i].heading for i in self.widths}

    def table(
        self, rows: Sequence[Row], title: str | None = None, *, has_headings: bool = True
    ) -> Table:
        """A table of these rows; content that is too wide for its column is wrapped or cut."""
        table = Table(
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
        cells = [list(map(_cell, row, self.columns)) for row in rows]
        room = self.widths if self.fits else dict.fromkeys(self.widths, 0)
        for stretch in _stretches(cells, self.columns, room):
            parts = (
                [_cut(row[i], self.columns[i], width) for row in stretch]
                for i, width in self.widths.items()
            )
            table.add_row(*map(Text("\n").join, parts))
        return table


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
    cells = [list(map(_cell, row, columns)) for row in rows]
    natural = [_natural(i, column, cells) for i, column in enumerate(columns)]
    least = [_least(i, column, cells, natural[i]) for i, column in enumerate(columns)]
    shown = [i for i in range(len(columns)) if not rows or any(row[i].plain for row in cells)]
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
    return Layout(columns, widths, _sum(least, shown) <= width, tuple(left_out))


def _cell(content: str | Text, column: Column) -> Text:
    has_lines = column.shrink is Shrink.WRAP or column.is_number
    show = printable if has_lines else printable_line
    if isinstance(content, str):
        return Text.from_markup(show(content), emoji=False)
    shown = show(content.plain)
    return content if shown == content.plain else Text(shown, content.style)


def _natural(i: int, column: Column, cells: Sequence[Sequence[Text]]) -> int:
    lines = [line for row in cells for line in row[i].plain.split("\n")]
    lines += column.heading.split("\n")
    widest = max(map(cell_len, lines))
    return widest if column.shrink is Shrink.CUT_START else max(widest, column.min_width)


def _least(i: int, column: Column, cells: Sequence[Sequence[Text]], natural: int) -> int:
    if column.shrink in (Shrink.NEVER, Shrink.CUT_START):
        return natural
    least = max(column.min_width, *map(cell_len, column.heading.split("\n")))
    if column.shrink is Shrink.WRAP:
        words = {word.rstrip() for row in cells for word in words_of(row[i].plain)}
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


def _stretches(
    cells: Sequence[Sequence[Text]], columns: Sequence[Column], room: Mapping[int, int]
) -> Iterator[list[Sequence[Text]]]:
    """The rows in order: up to `_STRETCH` neighbours that are one line each in a list, every other row in its own."""

    def number(numbered: tuple[int, Sequence[Text]]) -> int:
        index, row = numbered
        is_line = not any(
            not row[i].plain.isprintable()
            or (columns[i].shrink is Shrink.WRAP and cell_len(row[i].plain) > width)
            for i, width in room.items()
        )
        return index // _STRETCH if is_line else ~index

    for _, stretch in itertools.groupby(enumerate(cells), number):
        yield [row for _, row in stretch]


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
