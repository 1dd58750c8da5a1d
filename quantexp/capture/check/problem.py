"""A difference between the parts of a capture folder, and the result of a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One difference: where it is, and what is wrong."""

    #: The file's path in the capture folder.
    file: str
    what: str
    #: The number of the line in that file, from 1.
    line: int | None = None

    def __str__(self) -> str:
        """`manifest.jsonl, line 4: it is empty`."""
        place = "" if self.line is None else f", line {self.line}"
        return f"{self.file}{place}: {self.what}"


@dataclass(frozen=True)
class Listed:
    """A readable line of a list."""

    file: str
    number: int
    content: dict[str, Any]

    def problem(self, what: str) -> Problem:
        """A problem of this line."""
        return Problem(self.file, what, self.number)


@dataclass(frozen=True)
class Checked:
    """The result of a check."""

    #: The tensors with values, those of them with the manifest's hash, and those without a hash.
    num_tensors: int
    num_intact: int
    num_without_hash: int
    #: The lines of all lists, unreadable ones included, and the files below the folder.
    num_lines: int
    num_files: int
    problems: Sequence[Problem]
    #: What could not be checked, in words.
    notes: Sequence[str] = ()

    def summary(self) -> str:
        """The result in one line."""
        line = f"{self.num_intact} of {self.num_tensors} tensors have the values of the manifest's hash"
        if self.num_without_hash:
            line += f", {self.num_without_hash} have no hash to be checked by"
        line += f"; {self.num_lines} lines, {self.num_files} files"
        if self.problems:
            line += f", {len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        return "; ".join([line, *self.notes])
