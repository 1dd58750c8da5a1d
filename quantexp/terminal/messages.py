"""Messages on standard error: one line of a bounded length, whatever values they quote."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from quantexp.terminal.escaping import printable_line

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
