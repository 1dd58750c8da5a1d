"""Embeds the figures of runs in the report; figures over the limit are only listed."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantexp.analysis.tree import FILTERED, QUICK
from quantexp.runs.paths import RunDir

#: Maximum bytes of the PNG files of all runs of a report; base64 adds a third.
MAX_BYTES = 3_000_000
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_FIRST = f"{QUICK}.png"
#: Of some of the tensors.
_NOT_SHOWN = f"{QUICK}{FILTERED}.png"


@dataclass
class Pictures:
    """The figures of one run."""

    #: Name in the run's `figures/`, and the content in base64.
    shown: list[tuple[str, str]] = field(default_factory=list)
    #: Names of figures that are not embedded.
    left_out: list[str] = field(default_factory=list)


def pictures(runs: Sequence[RunDir], max_bytes: int = MAX_BYTES) -> list[Pictures]:
    """The figures of each run, interleaved up to the limit, with the overview of every run first."""
    embedded = [Pictures() for _ in runs]
    room = max_bytes
    for name, i, path in _in_turn(runs):
        size = path.stat().st_size
        content = path.read_bytes() if size <= room else b""
        if content.startswith(_SIGNATURE):
            room -= size
            embedded[i].shown.append((name, base64.b64encode(content).decode()))
        else:
            embedded[i].left_out.append(name)
    return embedded


def _in_turn(runs: Sequence[RunDir]) -> Iterator[tuple[str, int, Path]]:
    """Each run's overview, then each run's second figure, and so on."""
    listed = [_from_each_folder(_files(run)) for run in runs]
    for turn in range(max(map(len, listed), default=0)):
        for i, files in enumerate(listed):
            if turn < len(files):
                yield files[turn][0], i, files[turn][1]


def _from_each_folder(files: Iterable[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """The overview, then the first figure of each folder, then the second of each, so that every kind is included.

    Of as many as are equally good the smallest come first: a map of 32 heads has the room of five other figures.
    """
    places: Counter[Path] = Counter()
    ranked = []
    for name, path in sorted(files):
        ranked.append((name != _FIRST, places[path.parent], path.stat().st_size, name, path))
        places[path.parent] += 1
    return [(name, path) for *_, name, path in sorted(ranked)]


def _files(run: RunDir) -> Iterator[tuple[str, Path]]:
    """PNG files below the run's figures: none that a link leads to elsewhere, and no overview of filtered tensors."""
    inside = run.figures.resolve()
    for path in run.figures.rglob("*.png"):
        if path == run.figures / _NOT_SHOWN:
            continue
        if path.is_file() and path.resolve().is_relative_to(inside):
            yield str(path.relative_to(run.figures)), path
