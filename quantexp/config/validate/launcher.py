"""Combinations of the launcher's keys that hold for every kind: the share of a batch, the layout of a job.

What one kind alone refuses is in its launcher.
"""

from __future__ import annotations

import dataclasses

from quantexp.errors import ConfigError
from quantexp.model.layout import Layout
from quantexp.schema import Experiment, JobConfig, LauncherConfig, SlurmConfig
from quantexp.schema.launcher import SLURM
from quantexp.schema.limits import check_limits, next_multiple


def validate_launcher(experiment: Experiment) -> None:
    """Refuse a layout or a request that cannot run.

    Raises:
        ConfigError: names the first invalid key.
    """
    launcher = experiment.launcher
    if launcher.kind != SLURM:
        _unused(launcher)
    check_limits("launcher", launcher)
    check_share_of_batch(experiment)
    if not launcher.is_local:
        _job(launcher)


def check_share_of_batch(experiment: Experiment) -> None:
    """Refuse a batch that does not divide among the data-parallel ranks.

    Raises:
        ConfigError: names the batch and its divisor.
    """
    layout, training = Layout.of(experiment), experiment.training
    together = training.micro_batch_size * layout.micro_batches_together
    if training.global_batch_size % together:
        raise ConfigError(
            f"training.global_batch_size must be a multiple of training.micro_batch_size x "
            f"{layout.micro_batches_in_words} = {training.micro_batch_size} x {layout.micro_batches_together} = "
            f"{together}, got {training.global_batch_size}; take training.global_batch_size="
            f"{next_multiple(training.global_batch_size, together)}"
        )


def _unused(launcher: LauncherConfig) -> None:
    """Refuse keys that the launcher's kind does not read."""
    plain = SlurmConfig()
    of_any_job = {field.name for field in dataclasses.fields(JobConfig)}
    for key in (field.name for field in dataclasses.fields(SlurmConfig)):
        if key in of_any_job and not launcher.is_local:
            continue
        if getattr(launcher, key) != getattr(plain, key):
            raise ConfigError(
                f"launcher.{key}={getattr(launcher, key)} is for SLURM and has no effect under "
                f"launcher.kind={launcher.kind}; add launcher=slurm, or drop it"
            )


def _job(launcher: LauncherConfig) -> None:
    """Refuse resources that no cluster can give."""
    if launcher.num_processes % launcher.nodes:
        raise ConfigError(
            f"launcher.num_processes must be a multiple of launcher.nodes={launcher.nodes}, got "
            f"{launcher.num_processes}; take launcher.num_processes="
            f"{next_multiple(launcher.num_processes, launcher.nodes)}"
        )
    processes_per_node = launcher.num_processes // launcher.nodes
    if launcher.gpus_per_node not in (0, processes_per_node):
        raise ConfigError(
            f"launcher.gpus_per_node must be 0 (CPU) or {processes_per_node}, a GPU for each of a node's processes "
            f"(launcher.num_processes={launcher.num_processes} over launcher.nodes={launcher.nodes}), got "
            f"{launcher.gpus_per_node}"
        )
    if launcher.gpu_type is not None and not launcher.gpus_per_node:
        raise ConfigError(
            f"launcher.gpu_type={launcher.gpu_type} needs launcher.gpus_per_node of at least 1"
        )
    if launcher.detach:
        raise ConfigError(
            "launcher.detach=true is for runs of this machine: a job is never waited for; drop it"
        )
