"""Runs that cannot end well are refused before any of them starts: their predicted memory is more than there is.

What would not start anyway is not refused: it has completed already, or has no data. Neither is what has
`memory=ignore`. Runs that go on at once on the CPU of this machine have to fit in its memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quantexp.errors import QuantexpError, TooLargeError
from quantexp.launch.attempt import run_folder
from quantexp.launch.label import labels
from quantexp.launch.reuse import skipped_or_noticed
from quantexp.memory.room import STARTED_ANYWAY, fits, misfit, needed_gb, never, room_of
from quantexp.processes.host_memory import host_memory_gb
from quantexp.runs.device import device_class
from quantexp.schema import Experiment, LauncherKind, MemoryCheck


@dataclass(frozen=True)
class Request:
    """A run that is to start."""

    experiment: Experiment
    #: Composes the same run under `training=fast`.
    fast: Callable[[], Experiment | None] = never


def require_memory(runs: Sequence[Request]) -> None:
    """Refuse to start any of these runs where one of them does not fit, or those that go on at once together do not.

    Raises:
        TooLargeError: with every run that does not fit, and what would make it fit.
    """
    named = zip(labels([run.experiment for run in runs]), runs, strict=True)
    checked = [each for each in named if each[1].experiment.memory is MemoryCheck.check]
    too_large = [
        (name, run)
        for name, run in checked
        if not fits(run.experiment, room_of(run.experiment)) and _starts(run.experiment)
    ]
    if too_large:
        raise TooLargeError(_refused(too_large, len(runs)))
    if together := too_large_together([run.experiment for run in runs]):
        raise TooLargeError(f"{together}; {STARTED_ANYWAY.format('them')}")


def _refused(too_large: Sequence[tuple[str, Request]], number: int) -> str:
    """One line for a single run; of a sweep a line for each run that does not fit."""
    misfits = [
        (name, misfit(run.experiment, room_of(run.experiment), fast=run.fast))
        for name, run in too_large
    ]
    if number == 1:
        return f"{misfits[0][1]}; {STARTED_ANYWAY.format('it')}"
    grouped = by_reason((name, str(fit)) for name, fit in misfits)
    lines = [f"  {'; '.join(names)}: {reason}" for reason, names in grouped.items()]
    which = "none of them was started" if len(misfits) == number else "no run was started"
    first = f"{len(misfits)} of {number} runs do not fit in memory, and {which}; "
    return "\n".join([first + STARTED_ANYWAY.format("them"), *lines])


def by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Reason -> the names of the runs that it is for, from pairs of a name and a reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    return names


def _starts(experiment: Experiment) -> bool:
    """Whether a run has its data and is not skipped."""
    try:
        run = run_folder(experiment, device_class(experiment.launcher))
    except QuantexpError:  # which is said when it is to start
        return False
    return skipped_or_noticed(experiment, run)[0] is None


def too_large_together(runs: Sequence[Experiment]) -> str | None:
    """Why so many runs at once on the CPU of this machine do not fit in its memory together; None where they do.

    None also where the largest does not fit alone: `require_memory` refuses that one by itself.
    """
    here = [
        run
        for run in runs
        if run.memory is MemoryCheck.check
        and run.launcher.kind is LauncherKind.local
        and device_class(run.launcher) == "cpu"
    ]
    at_once = max((run.launcher.max_parallel or 1 for run in here), default=1)
    there = host_memory_gb()
    if at_once == 1 or _largest(here, at_once) <= there:
        return None
    here = [run for run in here if _starts(run)]
    taken = _largest(here, at_once)
    if taken <= there or _largest(here, 1) > there:
        return None
    fewer = max(number for number in range(1, at_once) if _largest(here, number) <= there)
    return (
        f"launcher.max_parallel={at_once}: the {min(at_once, len(here))} largest runs take {taken:.1f} GB together, "
        f"which do not fit in {there:.1f} GB (this machine): launcher.max_parallel={fewer} takes "
        f"{_largest(here, fewer):.1f} GB"
    )


def _largest(experiments: Sequence[Experiment], number: int) -> float:
    """What so many of the largest runs take together, all their processes, in units of 1e9 bytes."""
    totals = (needed_gb(each) * each.launcher.num_processes for each in experiments)
    return sum(sorted(totals, reverse=True)[:number])
