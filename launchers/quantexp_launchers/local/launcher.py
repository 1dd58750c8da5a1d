"""The launcher `local`: processes of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from quantexp.errors import RunError
from quantexp.launch.backend import Launcher, LaunchPlan, Point, Standing
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Status
from quantexp.schema import Experiment


class LocalLauncher(Launcher):
    """Runs the points in slots of this machine, in the foreground or in the background."""

    def submit(self, points: Sequence[Point], console: Console, *, is_sweep: bool) -> int:
        """Run the points; one run alone shows a live line, a sweep a table."""
        if is_sweep:
            from quantexp_launchers.local.submit import run_points

            return run_points(points, console)
        ((experiment, _),) = points
        if experiment.launcher.detach:
            from quantexp_launchers.local.submit import detach_run

            return detach_run(experiment, console)
        from quantexp_launchers.local.execute import run_alone

        return run_alone(experiment, console)

    def standings(self, runs: Sequence[tuple[RunDir, Status]]) -> list[Standing]:
        """The standing of each run, from its lock, its process and the live sweeps."""
        from quantexp_launchers.local.standing import standings

        return standings(runs)

    def cancel(self, standings: Sequence[Standing]) -> dict[Path, str | None]:
        """Signal the workers; a run whose process is not visible yet is left out."""
        from quantexp_launchers.local.standing import cancel

        return cancel(standings)

    def kill(self, standings: Sequence[Standing], reason: str) -> None:
        """Kill the workers, with everything that they started."""
        from quantexp_launchers.local.standing import kill

        kill(standings, reason)

    def logs(self, standing: Standing) -> list[Path]:
        """The output of torchrun."""
        return [standing.run.torchrun_log]

    def live_job(self, run: RunDir, status: Status) -> str | None:
        """None: the lock holder executes the run, and there is no job besides."""
        return None

    def plan(self, experiment: Experiment, folder: Path) -> LaunchPlan:
        """The worker's command, and the slots if several runs execute in parallel."""
        from quantexp_launchers.local.processes import command
        from quantexp_launchers.local.slots import slots_for

        launcher = experiment.launcher
        words = command(folder, launcher.num_processes)
        if (launcher.max_parallel or 1) == 1:
            return LaunchPlan(words)
        try:
            return LaunchPlan(words, slots=[str(slot) for slot in slots_for([experiment])])
        except RunError as error:
            return LaunchPlan(words, missing=str(error))
