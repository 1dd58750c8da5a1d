r"""Shows characters that a terminal obeys, or a reader cannot see, by their code: `\x1b`, `\u202e`.

Names, reasons, logs and files of others may hold them: an escape sequence that moves the cursor, sets the title or
fills the clipboard, a carriage return that writes over a line, a mark that reverses the direction of a text, half of a
surrogate pair that no stream can write. Line feeds and tabs stay, unless a text is one line.
"""

from __future__ import annotations

import unicodedata

#: Control, format and private characters, surrogates, line and paragraph separators, and what is not assigned.
_HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"})


class _Codes(dict[int, str]):
    """Character -> itself or its code, filled when a character is first seen."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        is_hidden = unicodedata.category(character) in _HIDDEN
        text = ascii(character)[1:-1] if is_hidden else character
        self[code] = text
        return text


_ONE_LINE = _Codes()
_LINES = _Codes({ord("\n"): "\n", ord("\t"): "\t"})


def printable(text: str) -> str:
    """A text whose hidden characters are shown by their codes, except line feeds and tabs."""
    return text if text.isprintable() else text.translate(_LINES)


def printable_line(text: str) -> str:
    """A text whose hidden characters are shown by their codes; it is one line."""
    return text if text.isprintable() else text.translate(_ONE_LINE)


def printable_content(content: object) -> object:
    """JSON content with `printable` texts and keys."""
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, dict):
        return {printable_content(key): printable_content(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [printable_content(value) for value in content]
    return content
