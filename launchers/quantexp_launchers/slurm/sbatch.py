"""Submits a batch to SLURM: the job's script, its check, and sbatch.

    the configured environment, modules and setup lines
    quantexp_launchers.slurm.job begin    check the submission, move an earlier start aside
    srun ... quantexp_launchers.slurm.job rank   one for each rank; srun ends all tasks when one fails
    quantexp_launchers.slurm.job end      record the end, request a requeue

All of them import quantexp from the source snapshot taken at submission. submitit writes the options of sbatch and srun
into the script. Every value of the configuration is quoted, except `launcher.setup`, which is shell code. The script
exits only with 0 or 1, because sacct changes codes above 127.

Before anything is submitted, `sbatch --test-only` checks each batch; its error is reported once, without sbatch's
prefixes. sbatch's environment excludes variables that it would read as options or inherit from an enclosing job, and
the files it writes are readable by the user alone. submitit is imported when needed.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
from typing import Any

from quantexp.errors import RunError
from quantexp.runs.fencing import START
from quantexp.runs.paths import Submission
from quantexp.runs.snapshot import environment
from quantexp.schema import ContainerRuntime, LauncherConfig
from quantexp_launchers.slurm.batch import Batch
from quantexp_launchers.slurm.check import check_time, nodes_out_of_service
from quantexp_launchers.slurm.clients import CLIENT_S
from quantexp_launchers.slurm.job import NOTHING_TO_DO, REQUEUE

#: The id of this job. The bare id of an array may also be a task's, and selects all tasks in scontrol.
_OWN_JOB = "job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
#: The answer of `sbatch --test-only` if no nodes in service can run the job.
_NO_NODES = "Requested node configuration is not available"
#: Prefixes of variables that sbatch reads as options (SBATCH_), or that describe an enclosing job.
_CONFUSING = ("SBATCH_", "SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "PMI_", "PMIX_")
#: Variables with these prefixes that select the cluster, which stay.
_KEPT = ("SLURM_CONF", "SLURM_JWT")
#: The user's defaults for options that the configuration leaves out: variable -> the launcher's key.
_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
}
_NO_ANSWER = (
    f"the SLURM controller does not answer within {CLIENT_S:.0f} s; see `scontrol ping` and whether munge runs, "
    "and try again"
)


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
    return (
        f"{_python(batch)} -u -m quantexp_launchers.slurm.job rank {shlex.quote(str(batch.folder))}"
    )


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


def script(batch: Batch) -> str:
    """The exact script that `submit` sends for this batch."""
    from submitit.slurm.slurm import _make_sbatch_string

    num_runs = len(batch.runs)
    map_count = num_runs if num_runs > 1 else None
    return str(
        _make_sbatch_string(command(batch), batch.folder, map_count=map_count, **parameters(batch))
    )


def require_slurm() -> None:
    """Refuse to continue if SLURM's clients are missing.

    Raises:
        RunError: names the first missing client.
    """
    for client in ("sbatch", "srun", "squeue"):
        if shutil.which(client) is None:
            raise RunError(
                f"there is no SLURM here ({client} is not on PATH); submit from a login node, or leave launcher=slurm "
                "out to run on this machine"
            )


def check(batch: Batch) -> str | None:
    """Check with the scheduler that it would accept the batch and could start it; submits nothing.

    `--test-only` counts only nodes in service. Where others are out of service, for instance during maintenance, a
    batch that needs them passes the check: sbatch itself accepts it, and the job waits for them.

    Returns:
        What a user should know about a batch that could not be checked, or None.

    Raises:
        RunError: SLURM is not installed, does not answer, or refuses the batch; with SLURM's message.
    """
    require_slurm()
    notice = None
    try:
        _sbatch(["--test-only"], script(batch), batch.launcher)
    except RunError as error:
        nodes = nodes_out_of_service(batch.launcher.partition) if _NO_NODES in str(error) else ""
        if not nodes:
            raise
        notice = f"the job waits for nodes that are out of service: {nodes}"
    check_time(batch.launcher)
    return notice


def refusal(output: str) -> str:
    """The reason in sbatch's output."""
    reasons = [
        line.removeprefix("sbatch: ")
        .removeprefix("error: ")
        .removeprefix("allocation failure: ")
        .removeprefix("Batch job submission failed: ")
        for line in (line.strip() for line in output.splitlines())
        if line and not line.startswith("Try ")
    ]
    return "; ".join(dict.fromkeys(reasons)) or "it gives no reason"


def _request(launcher: LauncherConfig) -> str:
    """The request in terms of the configuration."""
    keys = [
        *("partition", "account", "qos", "time_min", "nodes", "gpus_per_node", "gpu_type"),
        *("cpus_per_process", "mem_gb", "constraint", "exclude", "nodelist", "reservation"),
        "mail_type",
    ]
    options = {key: getattr(launcher, key) for key in keys}
    options |= {f"sbatch.{name}": value for name, value in launcher.sbatch.items()}
    return "asked for " + ", ".join(
        f"launcher.{key}={value}" for key, value in options.items() if value is not None
    )


def submit(batch: Batch) -> list[str]:
    """Submit the batch and return the job id of each run: 123_0, 123_1, ..., or 123 for a single run.

    Raises:
        RunError: SLURM refused the batch, or did not answer; in the latter case it may have accepted it anyway.
    """
    text = script(batch)
    file = Submission(batch.folder).script
    file.write_text(text)
    file.chmod(0o600)
    answer = _sbatch(["--parsable"], text, batch.launcher)
    job_id = answer.strip().partition(";")[0]  # 123, or 123;cluster
    if not job_id.isdecimal():
        raise RunError(f"sbatch must answer with the job's id, got {answer.strip()!r}")
    if len(batch.runs) == 1:
        return [job_id]
    return [f"{job_id}_{task}" for task in range(len(batch.runs))]


def _sbatch(arguments: list[str], text: str, launcher: LauncherConfig) -> str:
    """The answer of sbatch to a script; the files of the job are readable by the user alone.

    Raises:
        RunError: sbatch refused the script, with its reasons, or did not answer.
    """
    try:
        completed = subprocess.run(
            ["sbatch", *arguments],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CLIENT_S,
            env=_environment(launcher),
            umask=0o077,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(_NO_ANSWER) from error
    if completed.returncode:
        why = refusal(completed.stderr)
        raise RunError(f"SLURM refuses the job: {why}; {_request(launcher)}")
    return completed.stdout


def _environment(launcher: LauncherConfig) -> dict[str, str]:
    """The environment for sbatch, which passes it to the job."""
    defaults = {name for name, key in _DEFAULTS.items() if getattr(launcher, key) is None}
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_CONFUSING) or name in _KEPT or name in defaults
    }
