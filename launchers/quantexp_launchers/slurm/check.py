"""Refuses requests to SLURM that contradict themselves, and options of sbatch and srun that quantexp sets itself.

Only `launcher.setup` reaches a shell as code; the script quotes everything else.
"""

from __future__ import annotations

import re

from quantexp.errors import ConfigError
from quantexp.runs.fencing import START
from quantexp.schema import LauncherConfig

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
    "wrap": None,
    "ntasks": "launcher.num_processes",
    "ntasks-per-node": "launcher.num_processes and launcher.nodes",
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
}
#: srun's arguments that quantexp sets itself, long and short -> the key that controls them.
_OWN_SRUN = {
    "--ntasks": "launcher.num_processes",
    "-n": "launcher.num_processes",
    "--ntasks-per-node": "launcher.num_processes and launcher.nodes",
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
}
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
        if name in _OWN_OPTIONS:
            raise _own(f"launcher.sbatch.{name}", _OWN_OPTIONS[name])
    if launcher.sbatch.get("gres", "").startswith("gpu"):
        raise _own(f"launcher.sbatch.gres={launcher.sbatch['gres']}", "launcher.gpus_per_node")
    for argument in launcher.srun_args:
        name = argument.partition("=")[0] if argument.startswith("--") else argument[:2]
        if name in _OWN_SRUN:
            raise _own(f"launcher.srun_args={argument}", _OWN_SRUN[name])


def _own(what: str, key: str | None) -> ConfigError:
    remedy = f"set {key}" if key else "quantexp needs it itself"
    return ConfigError(f"{what} cannot be set: {remedy}")
