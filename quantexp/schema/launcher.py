"""The configuration of how runs are launched: here, in containers, on a SLURM cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class LauncherKind(Enum):
    """Who starts the processes of a run."""

    local = "local"
    slurm = "slurm"


class ContainerRuntime(Enum):
    """What starts a container in a SLURM job."""

    apptainer = "apptainer"
    singularity = "singularity"
    pyxis = "pyxis"


@dataclass
class SlurmConfig:
    """What a SLURM job asks for; the cluster's own default where a value is null."""

    partition: str | None = None
    #: The account that is charged.
    account: str | None = None
    qos: str | None = None
    #: Time limit, minutes.
    time_min: int = 60
    #: Nodes of one run; its processes are spread over them evenly.
    nodes: int = 1
    #: GPUs of each node, one for each process there; 0 trains on CPU cores.
    gpus_per_node: int = 0
    #: SLURM's name for the kind of GPU (gres type).
    gpu_type: str | None = None
    #: CPU cores of each process.
    cpus_per_process: int | None = None
    #: Memory of each node, in units of 1e9 bytes.
    mem_gb: float | None = None
    #: Features that nodes must have.
    constraint: str | None = None
    #: Nodes not to use.
    exclude: str | None = None
    #: Nodes to use.
    nodelist: str | None = None
    reservation: str | None = None
    mail_user: str | None = None
    #: When SLURM writes a mail: END, FAIL, ...
    mail_type: str | None = None
    #: Modules to load before the run.
    modules: list[str] = field(default_factory=list)
    #: Shell lines that the job's script runs first, as they are.
    setup: list[str] = field(default_factory=list)
    #: Variables of the job's environment. Not for secrets: they stand in the script.
    environment: dict[str, str] = field(default_factory=dict)
    #: Image in which the run's processes start.
    container: str | None = None
    container_runtime: ContainerRuntime = ContainerRuntime.apptainer
    #: host:container[:options]; the run folders and quantexp's source are mounted anyway.
    container_mounts: list[str] = field(default_factory=list)
    #: Python on the nodes, or in the container; null is the one that submits.
    python: str | None = None
    #: Any other option of sbatch: its long name without dashes, and its value (true for a flag).
    sbatch: dict[str, str] = field(default_factory=dict)
    #: More arguments of srun.
    srun_args: list[str] = field(default_factory=list)
    #: How often the scheduler may start a run again (preemption, requeue, a lost node) before it has failed.
    max_requeue: int = 3
    #: Seconds before the time limit at which a run is warned.
    signal_s: int = 90
    #: One torchrun on each node instead of one task for each process.
    torchrun: bool = False


@dataclass
class LauncherConfig(SlurmConfig):
    """Where runs are started, and with what."""

    #: The choice's name.
    name: str = "local"
    #: local: processes of this machine. slurm: jobs; the keys of SlurmConfig are for it alone.
    kind: LauncherKind = LauncherKind.local
    #: Processes of one run, each with a share of every global batch (data parallel).
    num_processes: int = 1
    #: Minutes that a process waits for another one before the run has failed.
    timeout_min: float = 10.0
    #: CPU threads of one process; null leaves it to torch.
    num_threads: int | None = None
    #: Runs of a sweep at the same time; null is one here, and as many as the cluster gives under SLURM.
    max_parallel: int | None = None
    #: Return at once; the runs go on in the background (SLURM does so anyway).
    detach: bool = False
