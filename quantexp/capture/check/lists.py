"""Checks the lists of a capture folder: each line by itself, against the lines before it, and against the other list.

manifest.jsonl      each line once; per rank, iterations and the counters of file names ascend
statistics.jsonl    the same; each manifest line of values of its own has a line with the same metadata, in order
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from quantexp.capture.lines import lists_of, parsed_lines, tensor_key
from quantexp.capture.store.manifest import MANIFEST, STATISTICS
from quantexp.capture.store.values import PLACE, identity
from quantexp.errors import UnreadableError

#: The beginning of a captured tensor's name: the run's start, and the counter.
NAME = re.compile(r"(?:.*/)?(?P<timestamp>\d{8}_\d{6})_(?P<counter>\d+)_[^/]*")
#: Absent ranks that are named.
_MOST_ABSENT = 16


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


def read_list(folder: Path, name: str, *, is_live: bool) -> tuple[list[Listed], list[Problem], int]:
    """The readable lines of a list and its parts, the problems of the others, and the number of all lines.

    A last line that the writer has not finished is not a problem while the run is being written.
    """
    lines, num_lines = [], 0
    problems: list[Problem] = []
    for file in lists_of(folder, name):
        errors: list[UnreadableError] = []
        number = 0
        for line, content in parsed_lines(file, errors.append):
            problems += [
                Problem(file.name, "it is empty", blank) for blank in range(number + 1, line.number)
            ]
            number = line.number
            if content is not None:
                lines.append(Listed(file.name, number, content))
            if not line.is_ended and not is_live:
                problems.append(Problem(file.name, "it is cut off", number))
        num_lines += number
        problems += [_unreadable(file, error) for error in errors]
    return lines, problems, num_lines


def _unreadable(file: Path, error: UnreadableError) -> Problem:
    match = re.fullmatch(
        r"(?:, line (\d+))?:? ?(.*)", str(error).removeprefix(str(file)), re.DOTALL
    )
    assert match is not None
    number = None if match[1] is None else int(match[1])
    return Problem(file.name, f"it cannot be read: {match[2]}", number)


def check_lines(lines: Sequence[Listed]) -> Iterator[Problem]:
    """Lines of one list that repeat an earlier one, or break the order of their rank."""
    tensors: dict[object, Listed] = {}
    values: set[object] = set()
    last_iteration: dict[object, int] = {}
    last_counter: dict[object, int] = {}
    for line in lines:
        content, rank = line.content, str(line.content.get("rank"))
        if "tensor" not in content:
            yield line.problem("it names no tensor")
            continue
        first = tensors.setdefault(tensor_key(content), line)
        if first is not line:
            yield line.problem(f"it repeats line {first.number} of {first.file}")
            continue
        yield from _ascends(line, "iteration", content.get("iteration"), rank, last_iteration)
        if content.get("file") and (place := identity(content)) not in values:
            values.add(place)
            yield from _ascends(line, "file number", counter_of(content), rank, last_counter)


def _ascends(
    line: Listed, what: str, number: object, rank: str, last: dict[object, int]
) -> Iterator[Problem]:
    if isinstance(number, int):
        if number < last.get(rank, number):
            yield line.problem(f"it is out of order: {what} {number} after {last[rank]}")
        last[rank] = max(number, last.get(rank, number))


def counter_of(content: dict[str, Any]) -> int | None:
    """The counter in the name of a line's values; None without one."""
    name = content.get("key") or content.get("file")
    match = NAME.fullmatch(name) if isinstance(name, str) else None
    return None if match is None else int(match["counter"])


def owners(manifest: Sequence[Listed]) -> dict[tuple[str, str | None], Listed]:
    """The first line of each stored tensor; later lines only refer to its values."""
    first: dict[tuple[str, str | None], Listed] = {}
    for line in manifest:
        if line.content.get("file"):
            first.setdefault(identity(line.content), line)
    return first


def check_pairs(manifest: Sequence[Listed], statistics: Sequence[Listed]) -> Iterator[Problem]:
    """Lines of values whose line of statistics is missing, or has other metadata or another place in the order.

    Without any statistics there is nothing to compare.
    """
    if not statistics:
        return
    places = {tensor_key(line.content): i for i, line in enumerate(statistics)}
    values = owners(manifest).values()
    last: dict[object, tuple[int, Listed]] = {}
    for line in values:
        content = line.content
        place, rank = places.get(tensor_key(content)), content.get("rank")
        if place is None:
            yield line.problem(f"{STATISTICS} has no line of this tensor")
            continue
        other = statistics[place]
        if keys := different_keys(content, other.content, PLACE):
            yield line.problem(
                f"{', '.join(keys)} differ{'s' * (len(keys) == 1)} from line {other.number} of {other.file}"
            )
        before = last.setdefault(rank, (place, line))
        if place < before[0]:
            yield other.problem(
                f"it is out of order: {MANIFEST} has its tensor (line {line.number}) after line {before[1].number}"
            )
        last[rank] = max(before, (place, line), key=lambda pair: pair[0])


def different_keys(
    one: Mapping[str, Any], other: Mapping[str, Any], left_out: frozenset[str]
) -> list[str]:
    """The keys that one of both lacks, or has otherwise."""
    keys = {*one, *other} - left_out
    return sorted(k for k in keys if k not in one or k not in other or one[k] != other[k])


def check_ranks(lines: Sequence[Listed], num_ranks: int | None) -> Iterator[Problem]:
    """Ranks without any line, of those that the run had, or below the largest that is listed.

    In a model-parallel layout a rank may hold nothing that was captured, or only what another rank stores.
    """
    if any("data_rank" in line.content for line in lines):
        return
    ranks = {line.content["rank"] for line in lines if isinstance(line.content.get("rank"), int)}
    if not ranks:
        return
    num_expected = max(max(ranks) + 1, num_ranks or 0)
    absent = (rank for rank in range(num_expected) if rank not in ranks)
    for rank in islice(absent, _MOST_ABSENT):
        yield Problem(MANIFEST, f"it has no line of rank {rank}, of {num_expected} ranks")
