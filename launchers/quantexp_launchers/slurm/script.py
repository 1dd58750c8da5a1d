"""The script of a SLURM job: sbatch's options, the lines before and after the ranks, srun's arguments.

    the configured environment, modules and setup lines
    quantexp_launchers.slurm.job begin      check the submission, move an earlier start aside
    srun ... quantexp_launchers.slurm.task   one for each rank; srun ends all tasks when one fails
    quantexp_launchers.slurm.job end        record the end, request a requeue

All of them import quantexp from the source snapshot taken at submission. Every value of the configuration is quoted,
except `launcher.setup`, which is shell code. The script exits only with 0 or 1, because sacct changes codes above 127.
"""

from __future__ import annotations

import math
import shlex
import sys
from typing import Any

from quantexp.runs.fencing import START
from quantexp.runs.snapshot import environment
from quantexp.schema import ContainerRuntime, LauncherConfig
from quantexp_launchers.slurm.batch import Batch
from quantexp_launchers.slurm.job import NOTHING_TO_DO, REQUEUE

#: The id of this job. The bare id of an array may also be a task's, and selects all tasks in scontrol.
_OWN_JOB = "job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"


def parameters(batch: Batch) -> dict[str, Any]:
    """The batch as submitit's parameters; options that submitit does not know become additional options of sbatch."""
    launcher = batch.launcher
    further: dict[str, Any] = {
        "requeue" if launcher.max_requeue else "no-requeue": True,
        "reservation": launcher.reservation,
        "gpus-per-node": _gpus(launcher),
        "kill-on-invalid-dep": "yes" if batch.dependency else None,
        **{name: _flag(value) for name, value in launcher.sbatch.items()},
    }
    return {
        "job_name": batch.name,
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
        "dependency": batch.dependency,
        # A warning signal right at the start would kill ranks that have no handler yet.
        "signal_delay_s": min(launcher.signal_s, 30 * launcher.time_min),
        "array_parallelism": batch.throttle or len(batch.runs),
        "wckey": None,
        "additional_parameters": {k: v for k, v in further.items() if v is not None},
        "srun_args": _srun_args(batch),
        "setup": _before(batch),
        "teardown": _after(batch),
    }


def command(batch: Batch) -> str:
    """The shell command of a rank, which srun starts."""
    return f"{_python(batch)} -u -m quantexp_launchers.slurm.task {shlex.quote(str(batch.folder))}"


def _python(batch: Batch) -> str:
    """The shell command that starts Python, inside the container if it needs no SLURM plugin."""
    launcher = batch.launcher
    command = shlex.quote(launcher.python or sys.executable)
    if launcher.container is None or launcher.container_runtime is ContainerRuntime.pyxis:
        return command
    words = [launcher.container_runtime.value, "exec"]
    if launcher.gpus_per_node:
        words.append("--nv")
    for mount in _mounts(batch):
        words += ["--bind", mount]
    return f"{shlex.join([*words, launcher.container])} {command}"


def _gpus(launcher: LauncherConfig) -> str | None:
    if not launcher.gpus_per_node:
        return None
    kind = f"{launcher.gpu_type}:" if launcher.gpu_type else ""
    return f"{kind}{launcher.gpus_per_node}"


def _flag(value: str) -> str | bool:
    return True if value.lower() == "true" else value


def _srun_args(batch: Batch) -> list[str]:
    cpus = batch.launcher.cpus_per_process
    return [
        "--kill-on-bad-exit=1",
        # Since SLURM 22.05, srun does not inherit this from the job.
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *_pyxis(batch),
        *batch.launcher.srun_args,
    ]


def _before(batch: Batch) -> list[str]:
    """The script's lines before the ranks."""
    launcher = batch.launcher
    variables = dict(launcher.environment)
    if launcher.cpus_per_process is not None:
        variables.setdefault("OMP_NUM_THREADS", str(launcher.cpus_per_process))
    return [
        "umask 077",
        "trap true TERM  # the lines after the ranks are run even where the scheduler ends the job",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        *(f"module load {shlex.quote(module)} || exit 1" for module in launcher.modules),
        *launcher.setup,
        *_snapshot(batch),
        _OWN_JOB,
        f'export {START}="$SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}}"',
        f"{_job_step(batch, 'begin')} && begun=0 || begun=$?",
        f"[ $begun -ne {NOTHING_TO_DO} ] || exit 0",
        _requeue_if("begun"),
        "[ $begun -eq 0 ] || exit 1",
    ]


def _snapshot(batch: Batch) -> list[str]:
    """Python's search path: the snapshot first, then the value set by the lines before."""
    own = environment(batch.snapshot, inherit=False)
    path = shlex.quote(own.pop("PYTHONPATH"))
    return [
        f'export PYTHONPATH={path}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        *(f"export {name}={shlex.quote(value)}" for name, value in own.items()),
    ]


def _after(batch: Batch) -> list[str]:
    """The script's lines after the ranks."""
    return [
        "code=$?",
        "trap '' TERM  # nor are the commands of these lines ended",
        # Without `timeout`, which the signal would end: `job end` itself limits the time to wait for scontrol.
        f"{_job_step(batch, 'end')} $code < <(scontrol show job --oneliner $job) && code=0 || code=$?",
        _requeue_if("code"),
        "[ $code -eq 0 ] || exit 1",
        "exit 0",
    ]


def _requeue_if(variable: str) -> str:
    return f"[ ${variable} -ne {REQUEUE} ] || scontrol requeue $job"


def _job_step(batch: Batch, verb: str) -> str:
    words = ["-m", "quantexp_launchers.slurm.job", verb, str(batch.folder)]
    command = _python(batch)
    if pyxis := _pyxis(batch):
        command = (
            f"{shlex.join(['srun', '--ntasks=1', '--nodes=1', '--overlap', *pyxis])} {command}"
        )
    return f"{command} {shlex.join(words)}"


def _pyxis(batch: Batch) -> list[str]:
    launcher = batch.launcher
    if launcher.container is None or launcher.container_runtime is not ContainerRuntime.pyxis:
        return []
    return [
        f"--container-image={launcher.container}",
        f"--container-mounts={','.join(_mounts(batch))}",
    ]


def _mounts(batch: Batch) -> list[str]:
    """The container's mounts: the folder of runs, with its submissions and snapshots, and the configured ones."""
    root = batch.folder.parent.parent
    return [f"{root}:{root}", *batch.launcher.container_mounts]
