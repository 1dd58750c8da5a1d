"""Runs the replays of `quantexp bisect`: a round is one sweep, here or under SLURM, of what has not run before."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from quantexp.errors import RunError
from quantexp.folders import shell_word
from quantexp.launch.attempt import run_folder
from quantexp.launch.backend import launcher_of
from quantexp.launch.ledger.standing import settle, standings
from quantexp.launch.refusal import Request, require_startable
from quantexp.launch.reuse import other_code_or_versions
from quantexp.runs.device import device_class
from quantexp.runs.metrics import last_metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import Experiment

#: Seconds between two looks at runs that a scheduler executes.
_LOOK_S = 5.0


def run_all(experiments: Sequence[Experiment], console: Console) -> list[RunDir]:
    """Run what has not completed, wait for it, and return the folders in the order of the experiments.

    Replays that ended with weights that are not finite, after all their iterations, have failed and count as run.

    Raises:
        RunError: a run did not complete, or does not fit into the memory there is.
        ConfigError, DataError: a run cannot start.
    """
    folders = [run_folder(each, device_class(each.launcher)) for each in experiments]
    pairs = zip(folders, experiments, strict=True)
    missing = {run.root: each for run, each in pairs if not _has_run(run, each)}
    if missing:
        points = list(missing.values())
        require_startable([Request(each) for each in points])
        launcher = launcher_of(points[0].launcher.kind)
        launcher.submit([(each, 0) for each in points], console, is_sweep=True)
        _wait([RunDir(root) for root in missing])
    for run, experiment in zip(folders, experiments, strict=True):
        if not _has_run(run, experiment):
            status = read_status(run.status)
            changed = "its code or a package has changed since it began"
            why = (
                "it has no status"
                if status is None
                else f"{status.state.value}: {status.reason or changed}"
            )
            logs = f"quantexp logs {shell_word(str(run.root))}"
            raise RunError(
                f"a replay did not complete ({why}); see {logs}, and give the same command again to "
                "go on"
            )
    return folders


def _has_run(run: RunDir, experiment: Experiment) -> bool:
    """Whether a replay computed all its iterations, by the present code."""
    status = read_status(run.status)
    if status is None or status.state not in (State.COMPLETED, State.FAILED):
        return False
    if other_code_or_versions(run) is not None:
        return False
    if status.state is State.COMPLETED:
        return True
    last = None if experiment.gradient.only else last_metrics(run)
    return last is not None and last["iteration"] == experiment.training.last_iteration


def _wait(runs: Sequence[RunDir]) -> None:
    """Wait until no run waits or executes; those of this machine have ended already."""
    while any(settle(each).alive for each in standings(runs)):
        time.sleep(_LOOK_S)
