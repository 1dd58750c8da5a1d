"""Breaks text into lines between words. A command of quantexp is one word, so that it can be copied.

A command goes from `quantexp` to the first word that ends with a bracket, comma or semicolon, or to the end of the
line; a path in quotes may hold blanks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len
from rich.text import Text

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
