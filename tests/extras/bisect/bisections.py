"""Runs replays of `quantexp bisect` in the test's process, which takes a fraction of the time of a process for each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from quantexp.extras.bisect import rounds
from quantexp.launch.attempt import open_run, run_folder
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from quantexp.training.worker import Worker


def run_here(experiments: Sequence[Experiment], console: Console) -> list[RunDir]:
    """As `rounds.run_all`."""
    runs = []
    for experiment in experiments:
        run = run_folder(experiment, "cpu")
        if not rounds._has_run(run, experiment):
            with open_run(experiment, "cpu", ["test"]) as (folder, _):
                Worker(folder.run, experiment).run()
        assert rounds._has_run(run, experiment), run.status.read_text()
        runs.append(run)
    return runs
