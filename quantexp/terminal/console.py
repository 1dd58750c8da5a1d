"""The consoles of standard output and standard error, which show hidden characters by their codes (`escaping`).

Where standard output is a pipe or a file, lines are wide and end with their last letter. Tables pad every cell. On a
terminal nobody sees that; in a file it makes lines of blanks that editors mark, diffs show and `cut` keeps.

A message on standard error is one line of a bounded length, whatever values it quotes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from quantexp.terminal.escaping import printable, printable_line

#: Columns where there is no terminal, so that no name in a table is cut.
PIPE_WIDTH = 160
_PADDING = re.compile(r" +(?=\n)")


def plain(text: str, style: str = "") -> Text:
    """A text without markup, such as a name or a reason; rich's own `Text` drops some of the hidden characters."""
    return Text(printable(text), style)


class SafeConsole(Console):
    """A console that shows hidden characters by their codes, whatever prints them; its own colours stay."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of console markup."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of anything that can be printed."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield segment._replace(text=printable(segment.text))


def output_console() -> Console:
    """The terminal, or a `pipe_console` of `COLUMNS` columns where they are given, else `PIPE_WIDTH`."""
    console = SafeConsole()
    if console.is_terminal:
        return console
    return pipe_console(console.width if "COLUMNS" in os.environ else PIPE_WIDTH)


def pipe_console(width: int = PIPE_WIDTH) -> Console:
    """Standard output without blanks at the ends of lines."""
    return SafeConsole(file=cast(IO[str], _Unpadded(sys.stdout)), width=width)


def error_console() -> Console:
    """Standard error."""
    return SafeConsole(stderr=True)


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


#: Characters of a word, and of a whole message, that are shown; a word may be a path.
LONGEST_WORD, LONGEST_MESSAGE = 400, 2000
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def complain(message: str, listed: Sequence[str] = ()) -> None:
    """Write one line of a bounded length to standard error, and below it a line for each item of a list."""
    lines = [
        f"quantexp: {one_short_line(message)}",
        *(f"  {one_short_line(item)}" for item in listed),
    ]
    try:
        sys.stderr.write("".join(f"{line}\n" for line in lines))
    except BrokenPipeError:
        drop_rest(sys.stderr)


def drop_rest(stream: TextIO) -> None:
    """Drop what a stream holds and gets from now on, because its reader has ended, such as head."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def one_short_line(message: str) -> str:
    """The message in one line; the middle of a long word, and of a long message, is replaced by its length.

    Characters that act on a terminal instead of being shown are escaped.
    """
    shown = printable_line(re.sub(r"\s*[\r\n]\s*|\t", " ", message.strip()))
    words = _LONG_WORD.sub(lambda word: _shortened(word[0], LONGEST_WORD), shown)
    return _shortened(words, LONGEST_MESSAGE)


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    edge = longest // 4
    return f"{text[:edge]}...({len(text) - 2 * edge:,} characters)...{text[-edge:]}"
