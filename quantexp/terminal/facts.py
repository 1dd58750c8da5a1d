"""Prints facts of a run, plan or machine as headings and values.

Values wrap between words; a longer word starts at the left edge. Words, paths and commands are never broken, and paths
and commands stay on the line of their heading.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from quantexp.folders import short_path
from quantexp.terminal.escaping import printable, printable_line
from quantexp.terminal.fitted_table import wrapped

_GAP = 2


@dataclass
class Facts:
    """Rows of heading and value, printed together."""

    console: Console
    #: Heading, value, and whether the value wraps.
    _rows: list[tuple[Text, Text, bool]] = field(default_factory=list)

    def add_row(self, heading: str, value: str) -> None:
        """Add a heading and a value, both in console markup; the value wraps between words."""
        self._rows.append((_bold(heading), Text.from_markup(printable(value), emoji=False), True))

    def add_path(self, heading: str, path: Path) -> None:
        """Add a path, on a line that is never broken."""
        self.add_line(heading, str(short_path(path)))

    def add_line(self, heading: str, text: str) -> None:
        """Add plain text for copying, a path or a command, on a line that is never broken."""
        self._rows.append((_bold(heading), Text(printable_line(text)), False))

    def print(self) -> None:
        """Print the rows with aligned headings; a word that does not fit beside its heading is printed below it."""
        indent = max((heading.cell_len for heading, _, _ in self._rows), default=0) + _GAP
        for heading, value, wraps in self._rows:
            room = self.console.width - indent
            lead = heading
            for part in wrapped(value, room) if wraps else [value]:
                self._print_part(lead, part, indent, stays=not wraps)
                lead = Text()

    def _print_part(self, lead: Text, part: Text, indent: int, *, stays: bool) -> None:
        if stays or indent + part.cell_len <= self.console.width:
            gap = " " * (indent - lead.cell_len) if part.plain else ""
            part = Text.assemble(lead, gap, part)
        elif lead.plain:
            self.console.print(lead)
        self.console.print(part, soft_wrap=True)


def _bold(heading: str) -> Text:
    return Text.from_markup(printable_line(heading), style="bold", emoji=False)
