"""Reads the header of a safetensors file that anybody may have written: which tensor lies where.

    eight bytes: the length of the header; the header in JSON; the values, without gaps

As the reference implementation does, the reader refuses a header above 100 MB, values that overlap, that leave a gap or
that do not end with the file, and a name that is there twice. It reads no values and reserves no memory by what a
header says.

Source: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from quantexp.errors import DataError

#: Bits of an element by the format's names. A dtype of a later version is listed, and its size is not checked.
BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
#: A longer header is invalid (the reference implementation's limit).
_LARGEST_HEADER = 100_000_000
#: torch has no tensor of more dimensions.
_MOST_DIMENSIONS = 64
_LARGEST_EXTENT = (1 << 63) - 1


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    #: The format's name.
    dtype: str
    shape: tuple[int, ...]
    #: Range of bytes in the file.
    start: int
    stop: int


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a file by name, in the order of the header.

    Raises:
        DataError: as `read_header_and_metadata`.
    """
    return read_header_and_metadata(file)[0]


def read_header_and_metadata(file: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file by name, in the order of the header, and the texts that were stored with them.

    Raises:
        DataError: the file cannot be read, or is not a complete safetensors file; one line says why.
    """
    try:
        if not file.is_file():
            raise ValueError("it is not a regular file")
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                raise ValueError("its header does not fit into it")
            content = json.loads(stream.read(length), object_pairs_hook=_without_repeats)
        if not isinstance(content, dict):
            raise ValueError("its header is not an object")
        metadata = content.pop("__metadata__", None) or {}
        entries = {name: _entry(name, each, 8 + length, size) for name, each in content.items()}
        _require_no_gaps(entries, 8 + length, size)
    except RecursionError as error:
        raise DataError(
            f"{file} is not a complete safetensors file: its header is nested too deeply"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not a complete safetensors file: {error}") from error
    texts = metadata if isinstance(metadata, dict) else {}
    return entries, {key: text for key, text in texts.items() if isinstance(text, str)}


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("its header has a name twice")
    return content


def _entry(name: str, content: object, begin: int, size: int) -> Entry:
    fields = content if isinstance(content, dict) else {}
    shape = _naturals(name, "shape", fields.get("shape"), _MOST_DIMENSIONS)
    offsets = _naturals(name, "data_offsets", fields.get("data_offsets"), 2)
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or len(offsets) != 2:
        raise ValueError(f"{_short(name)} has no dtype or no data_offsets")
    start, stop = (begin + offset for offset in offsets)
    if not start <= stop <= size:
        raise ValueError(
            f"a tensor lies outside it, {_short(name)} at bytes {start} to {stop} (is the download complete?)"
        )
    num_bytes = stop - start
    if dtype in BITS and num_bytes * 8 != math.prod(shape) * BITS[dtype]:
        raise ValueError(
            f"{_short(name)} is a {dtype} tensor of shape {list(shape)} in {num_bytes} bytes"
        )
    return Entry(dtype, shape, start, stop)


def _naturals(name: str, key: str, content: object, most: int) -> tuple[int, ...]:
    """A list of whole numbers, none below zero."""
    if (
        not isinstance(content, list)
        or len(content) > most
        or not all(type(each) is int and 0 <= each <= _LARGEST_EXTENT for each in content)
    ):
        raise ValueError(f"{_short(name)} has no {key} of whole numbers")
    return tuple(cast(list[int], content))


def _require_no_gaps(entries: dict[str, Entry], begin: int, size: int) -> None:
    end = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            what = "overlaps the tensor before it" if entry.start < end else "begins after a gap"
            raise ValueError(f"{_short(name)} {what}")
        end = entry.stop
    if end != size:
        raise ValueError(f"{size - end} bytes after the last tensor")


def _short(name: str) -> str:
    """A name from a file, fit for a message of one line."""
    return repr(name if len(name) <= 100 else f"{name[:100]}...")
