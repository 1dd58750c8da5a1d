"""The standing of a run: its actual state now, from its folder and its launcher.

status.json holds what a run recorded last. A run that was killed, or whose job was ended, could not record that, so its
launcher's report, which sees the process or the job, takes precedence. `settle` records such an end in status.json, so
that it agrees with the scheduler; everything else only reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from quantexp.errors import QuantexpError, RunError, UnreadableError
from quantexp.launch.backend import Standing, kind_of, launcher_of
from quantexp.launch.outcome import pace
from quantexp.runs.fencing import drop_dead_claim
from quantexp.runs.lock import locked
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, finish, read_status, write_status

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


#: The reason in a cancelled run's status.
CANCELLED = "cancelled by quantexp cancel"


def mark_cancelled(standing: Standing, reason: str = CANCELLED) -> Standing:
    """Record a run as cancelled, unless another process holds its lock; returns the new standing."""
    return settle(replace(standing, state=State.CANCELLED, alive=False, reason=reason, sure=True))


def settle(standing: Standing) -> Standing:
    """Write the standing to status.json if the run has ended and its status differs; returns the new standing.

    Nothing is written while another process holds the lock, if the folder is read-only, or if the status has changed
    since it was read; a later call writes it then.
    """
    if not standing.is_unrecorded_end:
        return standing
    assert standing.state is not None
    with contextlib.suppress(RunError, OSError):
        return _record(standing, standing.state)
    return standing


def _record(standing: Standing, state: State) -> Standing:
    run = standing.run
    with locked(run, patience_s=0):
        status = read_status(run.status)
        if status != standing.status:
            return standing
        ended = standing.job.ended if standing.job is not None else None
        status = replace(standing.status, capture=dict(standing.status.capture))
        finish(status, state, standing.reason)
        if ended is not None:
            status.finished = ended.isoformat(timespec="milliseconds")
        if standing.job is not None:
            status.job_id = standing.job.id
        run.reserve.unlink(missing_ok=True)
        drop_dead_claim(run)
        write_status(run.status, status)
    return replace(standing, status=status)
