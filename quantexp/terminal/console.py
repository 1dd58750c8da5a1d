"""The console of standard output. Where that is a pipe or a file, lines are wide and end with their last letter.

Tables pad every cell. On a terminal nobody sees that; in a file it makes lines of blanks that editors mark, diffs show
and `cut` keeps.
"""

from __future__ import annotations

import os
import re
import sys
from typing import IO, TextIO, cast

from rich.console import Console

#: Columns where there is no terminal, so that no name in a table is cut.
PIPE_WIDTH = 160
_PADDING = re.compile(r" +(?=\n)")


def output_console() -> Console:
    """The terminal, or a `pipe_console` of `COLUMNS` columns where they are given, else `PIPE_WIDTH`."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    return pipe_console(console.width if "COLUMNS" in os.environ else PIPE_WIDTH)


def pipe_console(width: int = PIPE_WIDTH) -> Console:
    """Standard output without blanks at the ends of lines."""
    return Console(file=cast(IO[str], _Unpadded(sys.stdout)), width=width, highlight=False)


class _Unpadded:
    """A stream that writes no blanks before a line's end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        #: By which rich chooses its letters.
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        self._stream.write(_PADDING.sub("", text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()
