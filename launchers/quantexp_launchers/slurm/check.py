"""Refuses requests to SLURM that contradict themselves, and options of sbatch and srun that quantexp sets itself.

That takes no SLURM. Before anything is submitted, `check_script` asks the scheduler whether it accepts the script. Only
`launcher.setup` reaches a shell as code; the script quotes everything else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from quantexp.errors import ConfigError, RunError
from quantexp.runs.fencing import START
from quantexp.schema import LauncherConfig
from quantexp_launchers.slurm import scheduler
from quantexp_launchers.slurm.clients import ClientError, run_client
from quantexp_launchers.slurm.states import minutes

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
#: sbatch's options that quantexp sets itself -> the key that controls them; None if no key does.
_OWN_OPTIONS = {
    "array": "launcher.max_parallel",
    "job-name": None,
    "output": None,
    "error": None,
    "open-mode": None,
    "signal": "launcher.signal_s",
    "dependency": "sweep.first",
    "export": "launcher.environment",
    "requeue": "launcher.max_requeue",
    "no-requeue": "launcher.max_requeue=0",
    "kill-on-invalid-dep": None,
    "chdir": None,
    "workdir": None,
    "wrap": None,
    "ntasks": "launcher.num_processes",
    "ntasks-per-node": "launcher.num_processes and launcher.nodes",
    "tasks-per-node": "launcher.num_processes and launcher.nodes",
    "time": "launcher.time_min",
    "nodes": "launcher.nodes",
    "cpus-per-task": "launcher.cpus_per_process",
    "mem": "launcher.mem_gb",
    "gpus-per-node": "launcher.gpus_per_node",
    "partition": "launcher.partition",
    "account": "launcher.account",
    "qos": "launcher.qos",
    "constraint": "launcher.constraint",
    "exclude": "launcher.exclude",
    "nodelist": "launcher.nodelist",
    "reservation": "launcher.reservation",
    "mail-user": "launcher.mail_user",
    "mail-type": "launcher.mail_type",
    "gpus": "launcher.gpus_per_node",
    "gpus-per-task": "launcher.gpus_per_node",
    "clusters": None,
    "parsable": None,
    "test-only": None,
    "wait": None,
    "help": None,
    "usage": None,
    "version": None,
    "export-file": "launcher.environment",
    "nodefile": "launcher.nodelist",
}
#: srun's arguments that quantexp sets itself, long and short -> the key that controls them.
_OWN_SRUN = {
    "--ntasks": "launcher.num_processes",
    "-n": "launcher.num_processes",
    "--ntasks-per-node": "launcher.num_processes and launcher.nodes",
    "--tasks-per-node": "launcher.num_processes and launcher.nodes",
    "--nodes": "launcher.nodes",
    "-N": "launcher.nodes",
    "--cpus-per-task": "launcher.cpus_per_process",
    "-c": "launcher.cpus_per_process",
    "--container-image": "launcher.container",
    "--container-mounts": "launcher.container_mounts",
    "--output": None,
    "-o": None,
    "--error": None,
    "-e": None,
    "--kill-on-bad-exit": None,
    "-K": None,
    "--multi-prog": None,
    "--jobid": None,
    "--test-only": None,
    "--help": None,
    "--usage": None,
    "--version": None,
    "-V": None,
    "-h": None,
}
#: srun's short options without a value.
_SRUN_FLAGS = "EHOQVXZhklsuv"
#: The answer of `sbatch --test-only` if no nodes in service can run the job.
_NO_NODES = "Requested node configuration is not available"
#: Variables that quantexp sets for every rank.
_OWN_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONSAFEPATH", "SUBMITIT_EXECUTOR", START),
}


def check_request(launcher: LauncherConfig) -> None:
    """Refuse a request that contradicts itself, or that sets what quantexp sets.

    Raises:
        ConfigError: names the key.
    """
    if launcher.container_mounts and launcher.container is None:
        raise ConfigError("launcher.container_mounts needs launcher.container")
    if launcher.container is not None and launcher.python is None:
        raise ConfigError(
            "launcher.container needs launcher.python, what starts Python inside it (python3)"
        )
    _script(launcher)


def _script(launcher: LauncherConfig) -> None:
    for name in launcher.environment:
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                f"launcher.environment must have names of letters, digits and _, got {name!r}"
            )
        if name in _OWN_VARIABLES:
            raise _own(f"launcher.environment.{name}", None)
    for name in launcher.sbatch:
        if not _OPTION.fullmatch(name):
            raise ConfigError(
                "launcher.sbatch must have sbatch's long option names without dashes in front (exclusive, licenses, "
                f"...), got {name!r}"
            )
        if own := _own_option(name, _OWN_OPTIONS):
            raise _own(f"launcher.sbatch.{name}", _OWN_OPTIONS[own])
    if any(part.strip().startswith("gpu") for part in launcher.sbatch.get("gres", "").split(",")):
        raise _own(f"launcher.sbatch.gres={launcher.sbatch['gres']}", "launcher.gpus_per_node")
    for argument in launcher.srun_args:
        for name in _options_in(argument):
            if own := _own_option(name, _OWN_SRUN):
                raise _own(f"launcher.srun_args={argument}", _OWN_SRUN[own])


def _own_option(name: str, own: Iterable[str]) -> str | None:
    """The option of quantexp that SLURM reads a name as: it takes any beginning of a long name that is unique."""
    if re.fullmatch(r"-[^-]", name):
        return name if name in own else None
    return next((option for option in own if option.startswith(name)), None)


def _options_in(argument: str) -> list[str]:
    """The names of the options in one argument of srun; a short one may follow short flags: `-un4`."""
    if argument.startswith("--"):
        return [argument.partition("=")[0]]
    if not argument.startswith("-"):
        return []
    flags = re.match(rf"-([{_SRUN_FLAGS}]*)(.?)", argument)
    assert flags is not None
    return [f"-{letter}" for letter in flags[1] + flags[2]]


def _own(what: str, key: str | None) -> ConfigError:
    remedy = f"set {key}" if key else "quantexp needs it itself"
    return ConfigError(f"{what} cannot be set: {remedy}")


def check_script(text: str, launcher: LauncherConfig) -> str | None:
    """Check with the scheduler that it would accept the script and could start it; submits nothing.

    `--test-only` counts only nodes in service. Where others are out of service, for instance during maintenance, a
    script that needs them passes the check: sbatch itself accepts it, and the job waits for them.

    Returns:
        What a user should know about a script that could not be checked, or None.

    Raises:
        RunError: SLURM is not installed, does not answer, or refuses the script; with SLURM's message.
    """
    scheduler.require_slurm()
    notice = None
    try:
        scheduler.sbatch(["--test-only"], text, launcher)
    except RunError as error:
        nodes = _nodes_out_of_service(launcher.partition) if _NO_NODES in str(error) else ""
        if not nodes:
            raise
        notice = f"the job waits for nodes that are out of service: {nodes}"
    _check_time(launcher)
    return notice


def _nodes_out_of_service(partition: str | None) -> str:
    """The drained, failed and lost nodes as `n1 (maintenance), n2 (disk)`; empty if there are none, or no answer."""
    command = ["sinfo", "--noheader", "--states=drain,down,fail,maint", "--format=%N (%E)"]
    try:
        lines = run_client([*command, *([f"--partition={partition}"] if partition else [])])
    except ClientError:
        return ""
    return ", ".join(dict.fromkeys(line.strip() for line in lines.splitlines() if line.strip()))


def _check_time(launcher: LauncherConfig) -> None:
    """Check the partition's time limit; a cluster without enforced limits accepts a longer job but never starts it.

    Raises:
        RunError: the time limit is longer than the partition's.
    """
    if launcher.qos is not None:  # a QOS may have another limit
        return
    try:
        lines = run_client(["sinfo", "--noheader", "--format=%P %l"]).splitlines()
    except ClientError:
        return
    limits = {name: minutes(limit) for name, _, limit in (line.partition(" ") for line in lines)}
    default = next((name for name in limits if name.endswith("*")), "")
    partitions = launcher.partition or os.environ.get("SBATCH_PARTITION") or default
    requested = [
        limits.get(name, limits.get(f"{name}*")) for name in partitions.rstrip("*").split(",")
    ]
    known = [limit for limit in requested if limit is not None]
    if len(known) == len(requested) and launcher.time_min > max(known):
        raise RunError(
            f"SLURM would never start the job: launcher.time_min must be at most {max(known)} in the partition "
            f"{partitions.rstrip('*')}, got {launcher.time_min}"
        )
