"""The list of an input's outputs, written when all of them exist.

An input that has one need not be read again: to resume, or to join what several tasks made, is to read the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from quantexp.data.prepare.outputs import writing
from quantexp.data.prepare.partial import PartialFolder
from quantexp.errors import UnreadableError
from quantexp.reading.json_files import read_json
from quantexp.runs.status import write_json


@dataclass(frozen=True)
class Listed:
    """One output of an input."""

    #: The name of its file.
    name: str
    #: Bytes of the input up to its end, as stored.
    num_read: int


def read_listing(folder: PartialFolder, index: int) -> list[Listed] | None:
    """Returns the outputs of an input in their order; None if it has no list, or a damaged one."""
    try:
        return read_json(folder.listing(index), list[Listed])
    except (FileNotFoundError, UnreadableError):
        return None


def write_listing(folder: PartialFolder, index: int, outputs: Sequence[Listed]) -> None:
    """Writes the list.

    Raises:
        DataError: it cannot be written.
    """
    with writing(folder.root):
        write_json(folder.listing(index), [asdict(output) for output in outputs])


def unfinished(folder: PartialFolder, among: Sequence[int]) -> list[int]:
    """Returns the inputs without a list: those that may have outputs to make."""
    return [index for index in among if not folder.listing(index).exists()]
