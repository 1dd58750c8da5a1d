"""The standing of a run: its actual state now, from its folder and its launcher.

status.json holds what a run recorded last. A run that was killed, or whose job was ended, could not record that, so its
launcher's report, which sees the process or the job, takes precedence. This module only reads; `settle` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from quantexp.errors import QuantexpError, UnreadableError
from quantexp.launch.backend import Standing, kind_of, launcher_of
from quantexp.launch.pace import pace
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status

#: The reason of a run whose configuration was deleted: no command can use it.
BROKEN = "broken: its config.yaml is gone; restore it, or delete the folder"


def standing(run: RunDir) -> Standing:
    """The standing of one run."""
    return standings([run])[0]


def standings(runs: Sequence[RunDir]) -> list[Standing]:
    """The standing of each run, with one query for each launcher; if it does not answer, `note` has the error."""
    of_kind: dict[str, list[tuple[RunDir, Status]]] = {}
    standing_of: dict[int, Standing] = {}
    for run in runs:
        status = _read(run)
        if isinstance(status, str):
            standing_of[id(run)] = Standing(run, None, reason=status)
        elif status.state is State.COMPLETED:
            standing_of[id(run)] = Standing(run, status.state, reason=status.reason, status=status)
        else:
            of_kind.setdefault(kind_of(status), []).append((run, status))
    for kind, recorded in of_kind.items():
        for (run, _), current in zip(recorded, _of_kind(kind, recorded), strict=True):
            standing_of[id(run)] = current
    return [_complete(standing_of[id(run)]) for run in runs]


def _of_kind(kind: str, recorded: Sequence[tuple[RunDir, Status]]) -> Iterator[Standing]:
    try:
        yield from launcher_of(kind).standings(recorded)
    except QuantexpError as error:
        for run, status in recorded:
            alive = status.state in (State.PENDING, State.RUNNING)
            note = f"its launcher was not queried: {error}" if alive else None
            yield Standing(run, status.state, alive, status.reason, note=note, status=status)


def _complete(current: Standing) -> Standing:
    """The standing with the run's pace; unreadable if a file is damaged, broken if its configuration is gone."""
    if current.state is None:
        return current
    try:
        current = replace(current, pace=pace(current.run, current.status))
    except UnreadableError as error:
        return replace(current, damage=_without_folder(current.run, error))
    if current.alive or current.run.config.is_file():
        return current
    return replace(current, state=None, reason=BROKEN, where="")


def _read(run: RunDir) -> Status | str:
    """The status of a run, or why there is none."""
    try:
        status = read_status(run.status)
    except UnreadableError as error:
        return _without_folder(run, error)
    return status or "it has no status.json: it was never started"


def _without_folder(run: RunDir, error: UnreadableError) -> str:
    """The error without the run's folder: the table shows the run's name."""
    return str(error).replace(f"{run.root}/", "")
