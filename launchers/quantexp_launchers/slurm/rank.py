"""One rank of a job: its worker in a child, watched from outside, because srun cannot see that it makes no progress."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from quantexp.config.load import read
from quantexp.processes.silence import Watch
from quantexp.processes.watched_child import end_child, end_like, run_in_child
from quantexp.runs.fencing import is_ours
from quantexp.runs.outcome import UnresponsiveError, by_signal, record_unresponsive_rank
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import RANK_MAY_WAIT, record_silent_end
from quantexp.runs.status import now
from quantexp.schema import LauncherConfig
from quantexp.training.log import LOG

#: The range of rendezvous ports, one for each job; it ends below 32768, where ephemeral ports start.
FIRST_PORT, NUM_PORTS = 20000, 12000
#: Grace period of a silent worker, seconds, in which it writes its state before it is killed.
GRACE_S = 20.0


def run_rank(run: RunDir, environment: MutableMapping[str, str]) -> int:
    """Run one rank and return the exit code; the ranks meet at the job's first host."""
    from submitit import JobEnvironment

    job = JobEnvironment()
    environment.update(
        RANK=str(job.global_rank),
        WORLD_SIZE=str(job.num_tasks),
        LOCAL_RANK=str(job.local_rank),
        MASTER_ADDR=job.hostnames[0],
        MASTER_PORT=str(rendezvous_port(int(job.raw_job_id))),
    )

    def work() -> int:
        from quantexp.training import worker

        return worker.main([str(run.root), "--in-job"])

    return _watched(run, read(run.config).launcher, job.global_rank, work)


def _watched(run: RunDir, launcher: LauncherConfig, rank: int, work: Callable[[], int]) -> int:
    """Run the worker in a child; ends it, and records why, if it makes no progress for `launcher.timeout_min`."""

    def look(child: int) -> Callable[[], None]:
        may_wait = 1.0 if launcher.num_processes == 1 else RANK_MAY_WAIT
        watch = Watch(child, launcher.timeout_min * 60, may_wait=may_wait)

        def once() -> None:
            if (silence := watch.look()) is not None:
                error = UnresponsiveError(run, rank, silence, launcher.timeout_min)
                LOG.error(error)
                end_child(child, GRACE_S)
                raise error

        return once

    try:
        code = run_in_child(work, look)
    except UnresponsiveError as error:
        if is_ours(run):
            record_unresponsive_rank(run, launcher.num_processes, error)
        return 1
    if code < 0 and launcher.num_processes > 1 and is_ours(run):
        record_silent_end(run, rank, by_signal(code), now())
    return end_like(code)


def rendezvous_port(job_id: int) -> int:
    """The rendezvous port of a job; two jobs on one node have different ports."""
    return FIRST_PORT + job_id % NUM_PORTS
