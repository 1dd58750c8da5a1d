"""Slots: disjoint parts of this machine in which runs of a sweep execute in parallel.

With GPUs, each slot has one GPU for each process of a run, and the workers see no other GPU. Without GPUs, each slot
has an equal share of the cores that this process may use; the remainder of the division stays idle, so that every run
of a sweep has the same number of threads. A single slot is the whole machine, without restrictions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from quantexp.errors import ConfigError, RunError
from quantexp.processes.machine import allowed_cores, ranges
from quantexp.runs.device import has_driver
from quantexp.schema import Experiment, LauncherConfig


@dataclass(frozen=True)
class Slot:
    """The resources of one run; empty means the whole machine."""

    #: Numbers or UUIDs, as in CUDA_VISIBLE_DEVICES.
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    #: CPU threads of all processes together; None leaves the number to torch.
    num_threads: int | None = None

    def variables(self, launcher: LauncherConfig) -> dict[str, str]:
        """The environment variables of a run's processes in this slot. A smaller OMP_NUM_THREADS of the user wins."""
        variables = {}
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[: launcher.num_processes])
        if self.num_threads is not None and launcher.num_threads is None:
            share = max(1, self.num_threads // launcher.num_processes)
            own = os.environ.get("OMP_NUM_THREADS", "")
            variables["OMP_NUM_THREADS"] = str(min(share, int(own)) if own.isdecimal() else share)
        return variables

    def enter(self) -> None:
        """Pin this thread, and every process it starts from now on, to the slot's cores, if the system supports it."""
        if self.cores and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # cores that this process has lost since
                os.sched_setaffinity(0, self.cores)

    def __str__(self) -> str:
        if self.gpus:
            return f"GPU {','.join(self.gpus)}"
        return f"core {ranges(self.cores)}" if self.cores else "the whole machine"


def slots_for(experiments: Sequence[Experiment]) -> list[Slot]:
    """The slots for the runs of one sweep, each large enough for its largest run.

    Raises:
        ConfigError: the runs have different `launcher.max_parallel`.
        RunError: the machine has too few GPUs or cores.
    """
    limits = {experiment.launcher.max_parallel for experiment in experiments}
    if len(limits) > 1:
        raise ConfigError(
            f"launcher.max_parallel is one for the whole sweep, got {', '.join(sorted(map(str, limits)))}; give it once"
        )
    num_processes = max(experiment.launcher.num_processes for experiment in experiments)
    return make_slots(limits.pop() or 1, num_processes)


def make_slots(num_slots: int, num_processes: int) -> list[Slot]:
    """`num_slots` equal slots, each for a run of `num_processes` processes.

    Raises:
        RunError: the machine has too few GPUs or cores, or its GPUs differ.
    """
    gpus, cores = visible_gpus(), allowed_cores()
    if gpus:
        _check_gpus(gpus, num_slots, num_processes)
    elif num_slots > len(cores):
        raise RunError(
            f"launcher.max_parallel={num_slots} needs a core for each run, and this process may use {len(cores)}; "
            "lower it"
        )
    if num_slots == 1:
        return [Slot()]
    share = max(1, len(cores) // num_slots)
    if gpus:
        starts = range(0, num_slots * num_processes, num_processes)
        return [Slot(tuple(gpus[s : s + num_processes]), (), share) for s in starts]
    return [Slot((), tuple(cores[i * share : (i + 1) * share]), share) for i in range(num_slots)]


def _check_gpus(gpus: list[str], num_slots: int, num_processes: int) -> None:
    import torch

    needed = num_slots * num_processes
    if needed > len(gpus):
        many = f"launcher.max_parallel={num_slots} x " if num_slots > 1 else ""
        in_all = f", {needed} in all," if num_slots > 1 else ""
        raise RunError(
            f"{many}launcher.num_processes={num_processes} needs a GPU for each process{in_all} and this machine has "
            f"{len(gpus)}; lower {'one of them' if num_slots > 1 else 'it'}"
        )
    kinds = sorted({torch.cuda.get_device_name(i) for i in range(needed)})
    if num_slots > 1 and len(kinds) > 1:
        raise RunError(
            f"launcher.max_parallel={num_slots} needs {needed} GPUs of one kind, because the kind is part of a run's "
            f"identity, and the first {needed} are {', '.join(kinds)}; choose some with CUDA_VISIBLE_DEVICES"
        )


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, named as in CUDA_VISIBLE_DEVICES; empty on a machine without CUDA."""
    if not has_driver():
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(count)]
    return [word.strip() for word in visible.split(",")][:count]
