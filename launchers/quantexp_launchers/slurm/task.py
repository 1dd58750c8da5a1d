"""The entry point of one task of a SLURM job, called by submitit: a rank, or a node's torchrun.

The rendezvous of the ranks is at the job's first host and a port derived from the job's id. Each task exits with the
run's exit code, so that SLURM's accounting is correct.

submitit installs signal handlers, which would requeue a job near its time limit and ignore a SIGTERM; they are removed
first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quantexp.config.load import read
from quantexp.runs.paths import RunDir
from quantexp.schema import LauncherConfig

if TYPE_CHECKING:
    from submitit import JobEnvironment

#: The range of rendezvous ports, one for each job; it ends below 32768, where ephemeral ports start.
FIRST_PORT, NUM_PORTS = 20000, 12000


def enter(run_dir: str, umask: int) -> None:
    """Run one task of the run's job; submitit pickles this function's name and its arguments.

    Args:
        run_dir: the run's folder.
        umask: the submitter's umask.

    Raises:
        SystemExit: the run did not complete.
    """
    from submitit import JobEnvironment

    signal.signal(
        signal.SIGUSR2, signal.SIG_IGN
    )  # until there is something that can take the warning
    for number in (signal.SIGTERM, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)
    of_submitit = os.umask(umask)
    launcher = read(RunDir(Path(run_dir)).config).launcher
    job = JobEnvironment()
    address = (job.hostnames[0], rendezvous_port(int(job.raw_job_id)))
    if launcher.torchrun and launcher.num_processes > 1:
        code = _torchrun(run_dir, launcher, job, address)
    else:
        code = _rank(run_dir, job, address)
    os.umask(of_submitit)
    if code:
        raise SystemExit(code)


def rendezvous_port(job_id: int) -> int:
    """The rendezvous port of a job; two jobs on one node have different ports."""
    return FIRST_PORT + job_id % NUM_PORTS


def _rank(run_dir: str, job: JobEnvironment, address: tuple[str, int]) -> int:
    from quantexp.training import worker

    os.environ.update(
        RANK=str(job.global_rank),
        WORLD_SIZE=str(job.num_tasks),
        LOCAL_RANK=str(job.local_rank),
        MASTER_ADDR=address[0],
        MASTER_PORT=str(address[1]),
    )
    return worker.main([run_dir, "--in-job"])


def _torchrun(
    run_dir: str, launcher: LauncherConfig, job: JobEnvironment, address: tuple[str, int]
) -> int:
    words = [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={job.num_nodes}",
        f"--node-rank={job.node}",
        f"--nproc-per-node={launcher.num_processes // launcher.nodes}",
        f"--master-addr={address[0]}",
        f"--master-port={address[1]}",
        *("-m", "quantexp.training.worker", run_dir, "--in-job"),
    ]
    with subprocess.Popen(words) as process:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: process.terminate())
        return process.wait()
