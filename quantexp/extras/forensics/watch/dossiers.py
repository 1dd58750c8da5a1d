"""The dossiers of runs: what happened in an iteration, as each run folder lists it. A file may appear at any time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quantexp.extras.forensics.watch.files import Kept
from quantexp.runs.dossiers import Dossier, dossier_files, read_dossier
from quantexp.runs.paths import RunDir
from quantexp.runs.status import instant

#: Dossiers that are listed.
MOST = 100


class Dossiers:
    """The dossiers of some runs."""

    def __init__(self) -> None:
        self._read = Kept(read_dossier)

    def of(self, runs: Iterable[RunDir]) -> list[dict[str, object]]:
        """The dossiers of the runs, newest first; one that is being written appears when it is whole."""
        rows = [
            (_seconds(dossier), _row(run, file, dossier))
            for run in runs
            for file in dossier_files(run)
            if (dossier := self._read(file)) is not None
        ]
        rows.sort(key=lambda one: one[0], reverse=True)
        return [row for _, row in rows[:MOST]]


def _seconds(dossier: Dossier) -> float:
    return instant(dossier.time).timestamp()


def _row(run: RunDir, file: Path, dossier: Dossier) -> dict[str, object]:
    return {
        "run": run.root.name,
        "folder": file.parent.name,
        "iteration": f"{dossier.iteration:,}",
        "seconds": _seconds(dossier),
        "trigger": dossier.trigger.value,
        "words": dossier.words,
    }
