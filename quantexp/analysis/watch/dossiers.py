"""The dossiers of runs: what happened in an iteration, as each run folder lists it. A file may appear at any time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Required, TypedDict

from quantexp.analysis.watch.files import Kept
from quantexp.errors import UnreadableError
from quantexp.reading.json_files import read_json
from quantexp.reading.typed import Count
from quantexp.runs.paths import RunDir
from quantexp.runs.status import instant

#: Dossiers that are listed.
MOST = 100
_MOST_BYTES = 1 << 24


class DossierFile(TypedDict, total=False):
    """The part of dossier.json that a list of dossiers shows."""

    iteration: Required[Count]
    #: Seconds since 1970, or a time in ISO 8601.
    time: float | str | None
    trigger: str
    words: str


class Dossiers:
    """The dossiers of some runs."""

    def __init__(self) -> None:
        self._read = Kept(_readable)

    def of(self, runs: Iterable[RunDir]) -> list[dict[str, object]]:
        """The dossiers of the runs, newest first; one that is being written appears when it is whole."""
        shown = [
            (_seconds(dossier), _row(run, file, dossier))
            for run in runs
            for file in sorted(run.dossiers.glob("iteration_*/dossier.json"))
            if (dossier := self._read(file)) is not None
        ]
        shown.sort(key=lambda one: one[0], reverse=True)
        return [row for _, row in shown[:MOST]]


def _readable(file: Path) -> DossierFile | None:
    try:
        dossier = read_json(file, DossierFile, _MOST_BYTES)
    except (FileNotFoundError, UnreadableError):
        return None
    return {key: dossier[key] for key in DossierFile.__annotations__ if key in dossier}  # type: ignore[return-value, literal-required]


def _seconds(dossier: DossierFile) -> float:
    time = dossier.get("time")
    if isinstance(time, int | float):
        return float(time)
    try:
        return instant(time or "").timestamp()
    except ValueError:
        return 0.0


def _row(run: RunDir, file: Path, dossier: DossierFile) -> dict[str, object]:
    return {
        "run": run.root.name,
        "folder": file.parent.name,
        "iteration": f"{dossier['iteration']:,}",
        "seconds": _seconds(dossier) or None,
        "trigger": dossier.get("trigger", ""),
        "words": dossier.get("words", ""),
    }
