"""What is known of one run or plan, a heading beside each value; values wrap between words, a path is never broken."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from quantexp.folders import short_path

_GAP = 2


@dataclass
class Facts:
    """Rows of heading and value, printed together."""

    console: Console
    _rows: list[tuple[str, str | Text]] = field(default_factory=list)

    def add_row(self, heading: str, value: str) -> None:
        """A value in console markup, which wraps between words."""
        self._rows.append((heading, value))

    def add_path(self, heading: str, path: Path) -> None:
        """A path, on a line that no width breaks."""
        self.add_line(heading, str(short_path(path)))

    def add_line(self, heading: str, text: str) -> None:
        """Plain text that is to be copied: a path or a command, on a line that no width breaks."""
        self._rows.append((heading, Text(text)))

    def print(self) -> None:
        """Print them, headings aligned; a line that does not fit beside its heading stands below it."""
        indent = max((cell_len(heading) for heading, _ in self._rows), default=0) + _GAP
        for heading, value in self._rows:
            if isinstance(value, Text):
                self._print_line(f"[bold]{heading}[/]", heading, value.plain, indent)
                continue
            lead = Text(heading.ljust(indent), style="bold")
            for part in Text.from_markup(value).wrap(self.console, self.console.width - indent):
                part.rstrip()
                self.console.print(Text.assemble(lead, part), soft_wrap=True)
                lead = Text(" " * indent)

    def _print_line(self, bold: str, heading: str, text: str, indent: int) -> None:
        fits = indent + cell_len(text) <= self.console.width
        gap = " " * (indent - cell_len(heading))
        if not fits and heading:
            self.console.print(bold)
        lead = f"{bold}{gap}" if fits else ""
        self.console.print(f"{lead}{escape(text)}", soft_wrap=True)
