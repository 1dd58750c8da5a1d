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
from quantexp.runs.recorded_config import model_section, model_text
from quantexp.runs.status import NEVER_STARTED, State, Status, finish, read_status, write_status


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
    known: set[str] = set()
    return [_complete(standing_of[id(run)], known) for run in runs]


def _of_kind(kind: str, recorded: Sequence[tuple[RunDir, Status]]) -> Iterator[Standing]:
    try:
        yield from launcher_of(kind).standings(recorded)
    except QuantexpError as error:
        for run, status in recorded:
            alive = status.state in (State.PENDING, State.RUNNING)
            note = f"its launcher was not queried: {error}" if alive else None
            yield Standing(run, status.state, alive, status.reason, note=note, status=status)


def _complete(current: Standing, known: set[str]) -> Standing:
    """The standing with the run's pace; unreadable if a file is damaged or gone.

    A run that is not alive and whose configuration cannot be read has no state: no command can use it. `known` gathers
    the texts of models without damage, which most runs have in common.
    """
    if current.state is None:
        return current
    try:
        if (text := model_text(current.run)) not in known:
            model_section(text, current.run)
            known.add(text)
    except UnreadableError as error:
        damage = current.run.without_folder(error)
        if current.alive:
            return replace(current, damage=damage)
        return replace(current, state=None, reason=damage, where="")
    try:
        return replace(current, pace=pace(current.run, current.status))
    except UnreadableError as error:
        return replace(current, damage=current.run.without_folder(error))


def _read(run: RunDir) -> Status | str:
    """The status of a run, or why there is none."""
    try:
        status = read_status(run.status)
    except UnreadableError as error:
        return run.without_folder(error)
    return status or NEVER_STARTED


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
