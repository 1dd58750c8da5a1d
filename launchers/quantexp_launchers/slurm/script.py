"""The script of a request to SLURM: sbatch's options, the first lines, and the command that srun starts.

    the configured environment, modules and setup lines
    quantexp_launchers.slurm.job begin    check the submission, move an earlier start aside
    srun ... quantexp_launchers.slurm.job rank   one for each rank; srun ends all tasks when one fails
    quantexp_launchers.slurm.job end      record the end, request a requeue

These are the lines of a run; a preparation has its own command instead. A script exits only with 0 or 1, because sacct
changes codes above 127.

Everything imports quantexp from the source snapshot taken at submission. submitit writes the options of sbatch and srun
into the script. Every value of the configuration is quoted, except `launcher.setup`, which is shell code. submitit is
imported when needed.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from quantexp.runs.fencing import START
from quantexp.runs.snapshot import environment
from quantexp.schema import ContainerRuntime, LauncherConfig
from quantexp_launchers.slurm.job import NOTHING_TO_DO, REQUEUE

#: The id of this job. The bare id of an array may also be a task's, and selects all tasks in scontrol.
_OWN_JOB = "job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"


class Request(Protocol):
    """A job, or an array of several tasks."""

    @property
    def folder(self) -> Path:
        """The submission's folder, which has the output of the jobs; the folder of runs is two above."""

    @property
    def name(self) -> str:
        """SLURM's job name."""

    @property
    def launcher(self) -> LauncherConfig:
        """The resources of a task."""

    @property
    def snapshot(self) -> Path:
        """The source snapshot that the tasks import."""

    @property
    def num_tasks(self) -> int:
        """One is a job, several are an array."""

    @property
    def throttle(self) -> int | None:
        """Maximum parallel tasks; None leaves the limit to the cluster."""

    @property
    def dependency(self) -> str | None:
        """sbatch's --dependency."""


def run_script(request: Request) -> str:
    """The exact script that is submitted for runs."""
    return script(request, _command(request), _before(request), _after(request))


def script(
    request: Request, command: str, before: Sequence[str] = (), after: Sequence[str] = ()
) -> str:
    """The exact script; srun starts `command` between the other lines."""
    from submitit.slurm.slurm import _make_sbatch_string

    map_count = request.num_tasks if request.num_tasks > 1 else None
    own = parameters(request, before, after)
    return str(_make_sbatch_string(command, request.folder, map_count=map_count, **own))


def parameters(request: Request, before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    """The request as submitit's parameters; options that submitit does not know become additional options of sbatch."""
    launcher = request.launcher
    further: dict[str, Any] = {
        "requeue" if launcher.max_requeue and not launcher.chain else "no-requeue": True,
        "reservation": launcher.reservation,
        "gpus-per-node": _gpus(launcher),
        "kill-on-invalid-dep": "yes" if request.dependency else None,
        **{name: _flag(value) for name, value in launcher.sbatch.items()},
    }
    return {
        "job_name": request.name,
        "partition": launcher.partition,
        "account": launcher.account,
        "qos": launcher.qos,
        "time": launcher.time_min,
        "nodes": launcher.nodes,
        "ntasks_per_node": launcher.num_processes // launcher.nodes,
        "cpus_per_task": launcher.cpus_per_process,
        "mem": _memory(launcher.mem_gb),
        "constraint": launcher.constraint,
        "exclude": launcher.exclude,
        "nodelist": launcher.nodelist,
        "mail_user": launcher.mail_user,
        "mail_type": launcher.mail_type,
        "dependency": request.dependency,
        # A warning signal right at the start would kill ranks that have no handler yet.
        "signal_delay_s": launcher.warning_s,
        "array_parallelism": request.throttle or request.num_tasks,
        "wckey": None,
        "additional_parameters": {k: v for k, v in further.items() if v is not None},
        "srun_args": _srun_args(request),
        "setup": list(before),
        "teardown": list(after),
    }


def _command(request: Request) -> str:
    """The shell command of a rank, which srun starts."""
    return f"{python(request)} -u -m quantexp_launchers.slurm.job rank {shlex.quote(str(request.folder))}"


def _before(request: Request) -> list[str]:
    """The script's lines before the ranks."""
    return [
        "umask 077",
        "trap true TERM  # the lines after the ranks are run even where the scheduler ends the job",
        *first_lines(request),
        _OWN_JOB,
        f'export {START}="$SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}}"',
        f"{_job_step(request, 'begin')} && begun=0 || begun=$?",
        f"[ $begun -ne {NOTHING_TO_DO} ] || exit 0",
        _requeue_if("begun"),
        "[ $begun -eq 0 ] || exit 1",
    ]


def _after(request: Request) -> list[str]:
    """The script's lines after the ranks."""
    return [
        "code=$?",
        "trap '' TERM  # nor are the commands of these lines ended",
        # Without `timeout`, which the signal would end: `job end` itself limits the time to wait for scontrol.
        f"{_job_step(request, 'end')} $code < <(scontrol show job --oneliner $job) && code=0 || code=$?",
        _requeue_if("code"),
        "[ $code -eq 0 ] || exit 1",
        "exit 0",
    ]


def _requeue_if(variable: str) -> str:
    return f"[ ${variable} -ne {REQUEUE} ] || scontrol requeue $job"


def _job_step(request: Request, verb: str) -> str:
    words = ["-m", "quantexp_launchers.slurm.job", verb, str(request.folder)]
    command = python(request)
    if arguments := pyxis(request):
        command = (
            f"{shlex.join(['srun', '--ntasks=1', '--nodes=1', '--overlap', *arguments])} {command}"
        )
    return f"{command} {shlex.join(words)}"


def first_lines(request: Request) -> list[str]:
    """The configured environment, modules and setup lines, and the search path of the snapshot."""
    launcher = request.launcher
    variables = dict(launcher.environment)
    if launcher.cpus_per_process is not None:
        variables.setdefault("OMP_NUM_THREADS", str(launcher.cpus_per_process))
    return [
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        *(f"module load {shlex.quote(module)} || exit 1" for module in launcher.modules),
        *launcher.setup,
        *_snapshot(request),
    ]


def _snapshot(request: Request) -> list[str]:
    """Python's search path: the snapshot first, then the value set by the lines before."""
    own = environment(request.snapshot, inherit=False)
    path = shlex.quote(own.pop("PYTHONPATH"))
    return [
        f'export PYTHONPATH={path}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        *(f"export {name}={shlex.quote(value)}" for name, value in own.items()),
    ]


def python(request: Request) -> str:
    """The shell command that starts Python, inside the container if it needs no SLURM plugin."""
    launcher = request.launcher
    command = shlex.quote(launcher.python or sys.executable)
    if launcher.container is None or launcher.container_runtime is ContainerRuntime.pyxis:
        return command
    words = [launcher.container_runtime.value, "exec"]
    if launcher.gpus_per_node:
        words.append("--nv")
    for mount in _mounts(request):
        words += ["--bind", mount]
    return f"{shlex.join([*words, launcher.container])} {command}"


def pyxis(request: Request) -> list[str]:
    """The arguments of srun that start its command in the container; empty without pyxis."""
    launcher = request.launcher
    if launcher.container is None or launcher.container_runtime is not ContainerRuntime.pyxis:
        return []
    return [
        f"--container-image={launcher.container}",
        f"--container-mounts={','.join(_mounts(request))}",
    ]


def _mounts(request: Request) -> list[str]:
    """The container's mounts: the folder of runs, with its submissions and snapshots, and the configured ones."""
    root = request.folder.parent.parent
    return [f"{root}:{root}", *request.launcher.container_mounts]


def _srun_args(request: Request) -> list[str]:
    cpus = request.launcher.cpus_per_process
    return [
        "--kill-on-bad-exit=1",
        # Since SLURM 22.05, srun does not inherit this from the job.
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *pyxis(request),
        *request.launcher.srun_args,
    ]


def _memory(gb: float | None) -> str | None:
    """sbatch's --mem; 0 is all memory of a node."""
    if not gb:
        return None if gb is None else "0"
    return f"{math.ceil(gb * 1e9 / 2**20)}M"


def _gpus(launcher: LauncherConfig) -> str | None:
    if not launcher.gpus_per_node:
        return None
    kind = f"{launcher.gpu_type}:" if launcher.gpu_type else ""
    return f"{kind}{launcher.gpus_per_node}"


def _flag(value: str) -> str | bool:
    return True if value.lower() == "true" else value
