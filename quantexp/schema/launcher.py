"""Configuration of a run's processes: what launches them, and how they divide the model.

A launcher is this machine, a SLURM cluster, or a kind of machine that another package adds. The data-parallel size
follows: launcher.num_processes / (tensor x pipeline x context). The numbers of a run depend on the layout only where
`quantexp.quant.alignment` lists slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quantexp.schema.limits import NOT_NEGATIVE, POSITIVE, Limit, at_most, between, limited, limits

#: The launcher kinds that have keys of their own in this schema; further kinds are entry points of other packages.
LOCAL, SLURM = "local", "slurm"
#: Ranks of a group, or stages.
_SIZE = between(1, 65_536)
#: A line break in an `#SBATCH` line would start a new line.
_ONE_LINE = Limit(
    lambda text: bool(text) and text.isprintable(), "must be one line of printable characters"
)


class ContainerRuntime(Enum):
    """The program that starts a container in a SLURM job."""

    apptainer = "apptainer"
    singularity = "singularity"
    pyxis = "pyxis"


@dataclass
class JobConfig:
    """The resources that a run requests from a cluster, whatever schedules it."""

    #: Time limit, minutes.
    time_min: int = limited(60, *between(1, 10_000_000))
    #: Nodes of one run; its processes are distributed over them evenly.
    nodes: int = limited(1, *between(1, 100_000))
    #: GPUs per node, one for each process there; 0 trains on CPU cores.
    gpus_per_node: int = limited(0, *between(0, 4_096))
    #: The cluster's name for the kind of GPU (SLURM's gres type).
    gpu_type: str | None = limited(None, _ONE_LINE)
    #: CPU cores per process.
    cpus_per_process: int | None = limited(None, *between(1, 65_536))
    #: Memory per node, in units of 1e9 bytes; 0 is all memory of each node.
    mem_gb: float | None = limited(None, NOT_NEGATIVE, at_most(1_000_000_000))


@dataclass
class SlurmConfig(JobConfig):
    """The request of a SLURM job; a null value means the cluster's default."""

    partition: str | None = limited(None, _ONE_LINE)
    #: The account to charge.
    account: str | None = limited(None, _ONE_LINE)
    qos: str | None = limited(None, _ONE_LINE)
    #: Features that the nodes must have.
    constraint: str | None = limited(None, _ONE_LINE)
    #: Nodes not to use.
    exclude: str | None = limited(None, _ONE_LINE)
    #: Nodes to use.
    nodelist: str | None = limited(None, _ONE_LINE)
    reservation: str | None = limited(None, _ONE_LINE)
    mail_user: str | None = limited(None, _ONE_LINE)
    #: When SLURM sends a mail: END, FAIL, ...
    mail_type: str | None = limited(None, _ONE_LINE)
    #: Modules to load before the run.
    modules: list[str] = field(default_factory=list, metadata=limits(_ONE_LINE))
    #: Shell lines at the beginning of the job's script, unchanged.
    setup: list[str] = field(default_factory=list)
    #: Variables of the job's environment. Not for secrets: they appear in the script.
    environment: dict[str, str] = field(default_factory=dict)
    #: Image in which the run's processes start.
    container: str | None = limited(None, _ONE_LINE)
    container_runtime: ContainerRuntime = ContainerRuntime.apptainer
    #: host:container[:options]; the run folders and quantexp's source are always mounted.
    container_mounts: list[str] = field(default_factory=list, metadata=limits(_ONE_LINE))
    #: Python on the nodes, or in the container; null means the submitting one.
    python: str | None = limited(None, _ONE_LINE)
    #: Any other option of sbatch: its long name without dashes, and its value (true for a flag).
    sbatch: dict[str, str] = field(default_factory=dict, metadata=limits(_ONE_LINE))
    #: Additional arguments of srun.
    srun_args: list[str] = field(default_factory=list, metadata=limits(_ONE_LINE))
    #: How often the scheduler may restart a run (preemption, requeue, a lost node) before it counts as failed.
    max_requeue: int = limited(3, *between(0, 1_000_000))
    #: Further jobs that wait for the end of a run's job (afterany) and go on with the run, instead of requeues: for
    #: sites that forbid those.
    chain: int = limited(0, *between(0, 1_000))
    #: Seconds before the time limit at which a run receives a warning signal. A run with checkpoint.optimizer trains on
    #: and saves as late as its last save allows, so this must exceed a save and an iteration.
    signal_s: int = limited(300, *between(1, 65_535))


@dataclass
class LauncherConfig(SlurmConfig):
    """Where and how runs are started."""

    #: The kind of machine: local (processes of this machine), slurm (jobs), or the name of an entry point in the group
    #: quantexp.launchers. The keys of JobConfig are for every kind but local, those of SlurmConfig for slurm alone.
    kind: str = LOCAL
    #: Processes of one run; those that hold the same part of the model share every global batch (data parallel).
    #: 0 means one for each requested GPU, or else as few as the section `parallel` needs.
    num_processes: int = limited(1, *between(0, 100_000))
    #: Minutes without progress after which a run fails, and the longest wait of one process for another.
    timeout_min: float = limited(10.0, POSITIVE, at_most(10_000_000))
    #: CPU threads of one process; null leaves it to torch.
    num_threads: int | None = limited(None, *between(1, 65_536))
    #: Concurrent runs of a sweep; null means one on this machine, and as many as the cluster allows elsewhere.
    max_parallel: int | None = limited(None, *between(1, 1_000_000))
    #: Return at once; the runs continue in the background (a job always does).
    detach: bool = False
    #: Keys of a kind that another package adds.
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def warning_s(self) -> int:
        """Seconds before the time limit at which a run is warned: at most half of it."""
        return min(self.signal_s, 30 * self.time_min)

    @property
    def most_restarts(self) -> int:
        """How often a run may start again by itself."""
        return self.chain or self.max_requeue

    @property
    def is_local(self) -> bool:
        """Whether the runs are processes of this machine."""
        return self.kind == LOCAL


class Dispatcher(Enum):
    """How tokens reach the ranks that hold their experts."""

    #: Every rank receives all tokens of its group and keeps those of its experts.
    allgather = "allgather"
    #: Every rank sends each token to the ranks of its experts only.
    alltoall = "alltoall"


class Unaligned(Enum):
    """How to treat a layout in which blocks of some slots fall otherwise than in one process."""

    #: Refuse it, and name the slots.
    refuse = "refuse"
    #: Run it; the layout is then part of the run's identity.
    accept = "accept"


@dataclass
class ParallelConfig:
    """The layout of one model over the processes of a run."""

    #: A layout by name; the choice `auto` takes the first of those that `quantexp plan` lists.
    name: str = "none"
    #: Ranks that share each layer: heads and widths are divided (tensor parallelism, arXiv 1909.08053).
    tensor: int = limited(1, *_SIZE)
    #: Divide the tokens between the ranks of a tensor-parallel group outside the products (sequence parallelism, arXiv
    #: 2205.05198); null means yes if tensor is above 1.
    sequence: bool | None = None
    #: Stages: each holds some of the layers (pipeline parallelism).
    pipeline: int = limited(1, *_SIZE)
    #: Chunks of layers a stage, interleaved (arXiv 2104.04473); 1 means none.
    virtual_pipeline: int = limited(1, *_SIZE)
    #: Ranks that share the routed experts of a layer.
    expert: int = limited(1, *_SIZE)
    #: Ranks that share each routed expert; null means as `tensor`, or 1 where `expert` leaves no ranks for it.
    expert_tensor: int | None = limited(None, *_SIZE)
    #: Ranks that share each sequence (context parallelism).
    context: int = limited(1, *_SIZE)
    dispatcher: Dispatcher = Dispatcher.allgather
    unaligned: Unaligned = Unaligned.refuse
    #: Choose the layout: the first that fits, of those that `quantexp plan` lists.
    auto: bool = False
