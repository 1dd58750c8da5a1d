"""Refuses runs that this machine cannot run, or that its memory or disk has no room for, before any starts.

Runs that would not start anyway are not checked: completed runs, and runs without data. Neither are runs with
`memory=ignore`. Runs that execute in parallel on this machine's CPU must fit in its memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quantexp.capture.select.budget import require_affordable_together
from quantexp.errors import CaptureError, ConfigError, QuantexpError, TooLargeError
from quantexp.extra import Service, required
from quantexp.launch.attempt import run_folder
from quantexp.launch.label import labels
from quantexp.launch.recorded import root_of
from quantexp.launch.reuse import skip_or_rerun_reason
from quantexp.memory.room import STARTED_ANYWAY, fits, misfit, needed_gb, never, room_of
from quantexp.processes.machine import host_memory_gb
from quantexp.runs.device import device_class
from quantexp.schema import Backend, Experiment, MemoryCheck


@dataclass(frozen=True)
class Request:
    """A run to start."""

    experiment: Experiment
    #: Composes the same run under `training=fast`.
    fast: Callable[[], Experiment | None] = never


def require_startable(runs: Sequence[Request]) -> None:
    """Refuse to start any run if one of them cannot run here, or does not fit.

    Raises:
        ConfigError: what the backend of one lacks.
        CaptureError: the captures of several runs together exceed the free disk space.
        TooLargeError: as `require_memory`.
    """
    require_backend(run.experiment for run in runs)
    require_memory(runs)
    if len(runs) > 1:
        _require_captures([run.experiment for run in runs])


def require_backend(experiments: Iterable[Experiment]) -> None:
    """Refuse to start any run if the backend of one cannot run where it would.

    Raises:
        ConfigError: what is missing.
    """
    for experiment in experiments:
        if (reason := missing_for_backend(experiment)) is not None:
            raise ConfigError(reason)


def missing_for_backend(experiment: Experiment) -> str | None:
    """What a run's backend lacks on the machine that would run it; None if nothing is known to be missing."""
    backend = experiment.quant.backend
    if backend is Backend.emulated:
        return None
    lacks = required(Service.BACKEND_LACKS, f"quant.backend={backend.value}")
    reason: str | None = lacks(experiment)
    return reason


def _require_captures(experiments: Sequence[Experiment]) -> None:
    try:
        require_affordable_together([(each, root_of(each)) for each in experiments])
    except CaptureError:  # some of these may be skipped, which takes longer to find
        starting = filter(_starts, experiments)
        require_affordable_together([(each, root_of(each)) for each in starting])


def require_memory(runs: Sequence[Request]) -> None:
    """Refuse to start any run if one of them does not fit, or if the parallel ones do not fit together.

    Raises:
        TooLargeError: names every run that does not fit, and what would make it fit.
    """
    too_large = [
        (name, run)
        for name, run in zip(labels([run.experiment for run in runs]), runs, strict=True)
        if run.experiment.checks_memory
        and not fits(run.experiment, room_of(run.experiment))
        and _starts(run.experiment)
    ]
    if too_large:
        raise _refused(too_large, len(runs))
    if together := too_large_together([run.experiment for run in runs]):
        raise TooLargeError(f"{together}; {STARTED_ANYWAY.format('them')}")


def _refused(too_large: Sequence[tuple[str, Request]], number: int) -> TooLargeError:
    """The error: one line for a single run, or one line for each run of a sweep that does not fit."""
    misfits = [
        (name, misfit(run.experiment, room_of(run.experiment), fast=run.fast))
        for name, run in too_large
    ]
    if number == 1:
        return TooLargeError(f"{misfits[0][1]}; {STARTED_ANYWAY.format('it')}")
    grouped = by_reason((name, str(fit)) for name, fit in misfits)
    lines = [f"{'; '.join(names)}: {reason}" for reason, names in grouped.items()]
    which = "none of them was started" if len(misfits) == number else "no run was started"
    first = f"{len(misfits)} of {number} runs do not fit in memory, and {which}; "
    return TooLargeError(first + STARTED_ANYWAY.format("them"), lines)


def by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Reason -> names of its runs, from pairs of name and reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    return names


def _starts(experiment: Experiment) -> bool:
    """Whether a run has its data and would not be skipped."""
    try:
        run = run_folder(experiment, device_class(experiment.launcher))
    except QuantexpError:  # reported when the run is started
        return False
    return skip_or_rerun_reason(experiment, run)[0] is None


def too_large_together(runs: Sequence[Experiment]) -> str | None:
    """Why the parallel runs on this machine's CPU do not fit in its memory together; None if they do.

    None also if the largest does not fit alone: `require_memory` refuses that run by itself.
    """
    local_runs = [
        run
        for run in runs
        if run.memory is MemoryCheck.check
        and run.launcher.is_local
        and device_class(run.launcher) == "cpu"
    ]
    max_parallel = max((run.launcher.max_parallel or 1 for run in local_runs), default=1)
    available_gb = host_memory_gb()
    if max_parallel == 1 or _largest(local_runs, max_parallel) <= available_gb:
        return None
    local_runs = [run for run in local_runs if _starts(run)]
    needed = _largest(local_runs, max_parallel)
    if needed <= available_gb or _largest(local_runs, 1) > available_gb:
        return None
    fewer = max(n for n in range(1, max_parallel) if _largest(local_runs, n) <= available_gb)
    return (
        f"launcher.max_parallel={max_parallel}: the {min(max_parallel, len(local_runs))} largest runs take "
        f"{needed:.1f} GB together, which do not fit in {available_gb:.1f} GB (this machine): "
        f"launcher.max_parallel={fewer} takes {_largest(local_runs, fewer):.1f} GB"
    )


def _largest(experiments: Sequence[Experiment], number: int) -> float:
    """The memory of the `number` largest runs with all their processes, in units of 1e9 bytes."""
    totals = (needed_gb(e) * e.launcher.num_processes for e in experiments)
    return sum(sorted(totals, reverse=True)[:number])
