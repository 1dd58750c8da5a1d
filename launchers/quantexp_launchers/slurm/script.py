"""The script of a request to SLURM: sbatch's options, the first lines, and the command that srun starts.

    the configured environment, modules and setup lines
    the lines before the command
    srun ... COMMAND
    the lines after it

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

from quantexp.runs.snapshot import environment
from quantexp.schema import ContainerRuntime, LauncherConfig


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
        "requeue" if launcher.max_requeue else "no-requeue": True,
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
        "mem": None if launcher.mem_gb is None else f"{math.ceil(launcher.mem_gb * 1e9 / 2**20)}M",
        "constraint": launcher.constraint,
        "exclude": launcher.exclude,
        "nodelist": launcher.nodelist,
        "mail_user": launcher.mail_user,
        "mail_type": launcher.mail_type,
        "dependency": request.dependency,
        # A warning signal right at the start would kill ranks that have no handler yet.
        "signal_delay_s": min(launcher.signal_s, 30 * launcher.time_min),
        "array_parallelism": request.throttle or request.num_tasks,
        "wckey": None,
        "additional_parameters": {k: v for k, v in further.items() if v is not None},
        "srun_args": _srun_args(request),
        "setup": list(before),
        "teardown": list(after),
    }


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


def _gpus(launcher: LauncherConfig) -> str | None:
    if not launcher.gpus_per_node:
        return None
    kind = f"{launcher.gpu_type}:" if launcher.gpu_type else ""
    return f"{kind}{launcher.gpus_per_node}"


def _flag(value: str) -> str | bool:
    return True if value.lower() == "true" else value
