"""One rank of a SLURM job: `python -m quantexp_launchers.slurm.task SUBMISSION`, started by srun.

It sets torchrun's variables from SLURM's and becomes the worker, whose exit code it returns, so that SLURM's accounting
is correct. The rendezvous of the ranks is at the job's first host and a port derived from the job's id.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from quantexp.runs.paths import Submission
from quantexp_launchers.slurm.job import own_task

#: The range of rendezvous ports, one for each job; it ends below 32768, where ephemeral ports start.
FIRST_PORT, NUM_PORTS = 20000, 12000


def main(argv: list[str] | None = None) -> int:
    """Run one rank of the job's run and return its exit code.

    Raises:
        RunError: the submission's folder is incomplete.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until the worker can take the warning
    (folder,) = sys.argv[1:] if argv is None else argv
    task = own_task(Submission(Path(folder)), os.environ)
    os.umask(task.umask)
    os.environ.update(_variables())
    from quantexp.training import worker

    return worker.main([str(task.run.root), "--in-job"])


def _variables() -> dict[str, str]:
    from submitit import JobEnvironment

    job = JobEnvironment()
    return {
        "RANK": str(job.global_rank),
        "WORLD_SIZE": str(job.num_tasks),
        "LOCAL_RANK": str(job.local_rank),
        "MASTER_ADDR": job.hostnames[0],
        "MASTER_PORT": str(rendezvous_port(int(job.raw_job_id))),
    }


def rendezvous_port(job_id: int) -> int:
    """The rendezvous port of a job; two jobs on one node have different ports."""
    return FIRST_PORT + job_id % NUM_PORTS


if __name__ == "__main__":
    sys.exit(main())
