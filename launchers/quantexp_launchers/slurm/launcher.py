"""The launcher `slurm`: jobs of a SLURM cluster, submitted and not waited for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from quantexp.launch.backend import Launcher, LaunchPlan, Point, Standing
from quantexp.runs.paths import RunDir, Submission
from quantexp.runs.status import Status
from quantexp.schema import Experiment, LauncherConfig
from quantexp_launchers.slurm.check import check_request


class SlurmLauncher(Launcher):
    """Submits the points as job arrays, one for each distinct request; the schema has its keys (`SlurmConfig`)."""

    def check(self, launcher: LauncherConfig) -> None:
        """Refuse a request that contradicts itself, or that sets what quantexp sets."""
        super().check(launcher)
        check_request(launcher)

    def submit(self, points: Sequence[Point], console: Console, *, is_sweep: bool) -> int:
        """Submit the points and print how to follow and stop them."""
        from quantexp_launchers.slurm.submit import submit_run, submit_sweep

        if is_sweep:
            return submit_sweep(list(points), console)
        ((experiment, _),) = points
        return submit_run(experiment, console)

    def standings(self, runs: Sequence[tuple[RunDir, Status]]) -> list[Standing]:
        """The standing of each run, from squeue and sacct."""
        from quantexp_launchers.slurm.standing import standings

        return standings(runs)

    def cancel(self, standings: Sequence[Standing]) -> dict[Path, str | None]:
        """Cancel the jobs by scancel."""
        from quantexp_launchers.slurm.standing import cancel

        return cancel(standings)

    def logs(self, standing: Standing) -> list[Path]:
        """The output of the job's script."""
        from quantexp_launchers.slurm.standing import job_logs

        job_id = standing.job.id if standing.job is not None else None
        return job_logs(standing.run, standing.status, job_id)

    def live_job(self, run: RunDir, status: Status) -> str | None:
        """The pending or running job of a run; queries squeue alone."""
        from quantexp_launchers.slurm.standing import live_job

        return live_job(status)

    def plan(self, experiment: Experiment, folder: Path) -> LaunchPlan:
        """The batch script; needs no SLURM."""
        from quantexp_launchers.slurm.executor import script
        from quantexp_launchers.slurm.submit import planned

        batch = planned(experiment, folder)
        command = ["sbatch", str(Submission(batch.folder).script)]
        return LaunchPlan(command, script=script(batch))
