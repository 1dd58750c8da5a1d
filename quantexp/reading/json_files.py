"""The reader of JSON files and of files with a JSON value in each line.

orjson parses: it refuses invalid UTF-8, half of a surrogate pair and a number beyond a float, and never recurses; of a
repeated key the last value counts. NaN and Infinity, which are not JSON but which Python's own writer writes, become
null. The depth, the size and the number of values are bounded here, because what follows may walk through them. `typed`
then checks the content against a type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import orjson

from quantexp.errors import UnreadableError
from quantexp.reading.files import MOST_LEVELS, open_file, read_bytes, unreadable
from quantexp.reading.typed import WrongTypeError, typed
from quantexp.terminal.units import human_bytes

#: Bytes of a file, values in it, and bytes of a line.
MOST_BYTES, MOST_VALUES, MOST_LINE = 1 << 27, 10_000_000, 1 << 24

_Kind = TypeVar("_Kind")
#: A value that Python's own writer may write.
_NOT_FINITE = re.compile(rb"(?<=[:,\[\s])-?(NaN|Infinity)(?=\s*[,\]}\n])")


def read_json(file: Path, kind: type[_Kind], most: int = MOST_BYTES) -> _Kind:
    """The content of a JSON file as a dataclass or TypedDict, as `typed` checks it.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: names the file and what is wrong with it, with the line or the key.
    """
    content = read_bytes(file, most)
    try:
        return typed(_parsed(content), kind)
    except orjson.JSONDecodeError as error:
        raise UnreadableError(f"{file}, line {error.lineno}: {error.msg}") from error
    except WrongTypeError as error:
        raise UnreadableError(f"{file}: {error}") from error


def require_json(file: Path, kind: type[_Kind]) -> _Kind:
    """`read_json` of a file that must be there.

    Raises:
        UnreadableError: as `read_json`, or there is no such file.
    """
    try:
        return read_json(file, kind)
    except FileNotFoundError as error:
        raise UnreadableError(f"{file} is missing") from error


def flat_values(lines: bytes) -> list[dict[str, Any]] | None:
    """The values of ended lines of which each is keys with plain values, parsed at once; None if one is anything else.

    This takes a tenth of the time of `value_of` for each line, which tells what is wrong.
    """
    count = lines.count(b"\n")
    if lines.count(b"{") + lines.count(b"[") != count:
        return None
    try:
        values = orjson.loads(b"[" + lines[:-1].replace(b"\n", b",") + b"]")
    except orjson.JSONDecodeError:
        return None
    return values if len(values) == count and all(type(v) is dict for v in values) else None


def json_of(text: str | bytes) -> Any:
    """The value of a JSON text within the bounds of a file.

    Raises:
        ValueError: it is not JSON, or exceeds a bound.
    """
    return _parsed(text.encode() if isinstance(text, str) else text)


@dataclass(frozen=True)
class Line:
    """A line of a file with a JSON value in each line."""

    #: From 1, counted from where the reading begins.
    number: int
    #: The bytes before the line.
    offset: int
    text: bytes

    @property
    def is_ended(self) -> bool:
        """Whether it ends with a newline; a line without may still be being written."""
        return self.text.endswith(b"\n")


def json_lines(
    file: Path, kind: type[_Kind], report: Callable[[UnreadableError], None]
) -> Iterator[_Kind]:
    """The values of a file with a JSON value in each line; nothing without the file.

    Each wrong line is reported and left out. A last line without a newline that is not JSON is left out without a
    report, because its process may be writing it, or was killed then.
    """
    for line in lines_of(file, report):
        if (value := value_of(line, file, kind, report)) is not None:
            yield value


def lines_of(file: Path, report: Callable[[UnreadableError], None]) -> Iterator[Line]:
    """The lines of a file that are not blank; reports a file that cannot be read, and a line that never ends."""
    try:
        stream = open_file(file)
    except FileNotFoundError:
        return
    except UnreadableError as error:
        report(error)
        return
    with stream:
        yield from lines_from(stream, file, report)


def lines_from(
    stream: BinaryIO, file: Path, report: Callable[[UnreadableError], None]
) -> Iterator[Line]:
    """The lines of an open file from its current position, as `lines_of` yields them."""
    number, offset = 0, stream.tell()
    while True:
        try:
            text = stream.readline(MOST_LINE + 1)
        except OSError as error:
            return report(unreadable(file, error))
        if not text:
            return None
        number += 1
        if len(text) > MOST_LINE:
            most = human_bytes(MOST_LINE)
            return report(
                UnreadableError(
                    f"{file}, line {number}: it has more than {most}, and ends the reading"
                )
            )
        if not text.isspace():
            yield Line(number, offset, text)
        offset += len(text)


def value_of(
    line: Line, file: Path, kind: type[_Kind], report: Callable[[UnreadableError], None]
) -> _Kind | None:
    """The value of a line; None after the report of a wrong one, or for an unfinished line."""
    try:
        return typed(_parsed(line.text), kind)
    except orjson.JSONDecodeError as error:
        if not line.is_ended:
            return None
        words = error.msg
    except WrongTypeError as error:
        words = str(error)
    report(UnreadableError(f"{file}, line {line.number}: {words}"))
    return None


def _parsed(content: bytes) -> Any:
    brackets = content.count(b"[") + content.count(b"{")
    if brackets + content.count(b",") > MOST_VALUES:
        raise WrongTypeError(f"must have at most {MOST_VALUES:,} values")
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        finite, replaced = _NOT_FINITE.subn(b"null", content)
        if not replaced:
            raise
        value = orjson.loads(finite)
    if brackets > MOST_LEVELS:
        _require_flat(value)
    return value


def _require_flat(value: Any) -> None:
    """Refuse values that are nested deeper than `MOST_LEVELS`, level by level."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise WrongTypeError(f"must have at most {MOST_LEVELS} levels of brackets")
