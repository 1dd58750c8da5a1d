"""The size of a capture: shown by the plan, checked against the budget before the launch, and enforced at run time.

The size of the values is exact. The files' framing and the lines of manifest and statistics add `FRAMING_BYTES` for
each tensor.
"""

from __future__ import annotations

import shutil
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from quantexp.capture.select.choice import expected_alike, takes_micro_batch
from quantexp.capture.select.rules import captured_iterations
from quantexp.errors import CaptureError
from quantexp.folders import user_path
from quantexp.model.sizes import num_micro_batches_each
from quantexp.quant.precision import PrecisionMap, changes, declared_maps
from quantexp.schema import CaptureLevel, Experiment

#: A file's framing, its part of a file system block, and two lines of JSON.
FRAMING_BYTES = 12_000


@dataclass(frozen=True)
class Price:
    """The size of a run's capture."""

    #: The number of files with values, and the bytes of the values.
    tensors: int
    num_bytes: int
    #: The number of tensors with statistics, including those with values.
    statistics: int

    @property
    def on_disk(self) -> int:
        """The maximum bytes on disk."""
        return self.num_bytes + self.statistics * FRAMING_BYTES


def price(experiment: Experiment, maps: Sequence[PrecisionMap] | None = None) -> Price:
    """The size of an experiment's capture, from its configuration alone; `maps` are its `declared_maps`."""
    if maps is None:
        maps = declared_maps(experiment.model, experiment.quant)
    ranks = experiment.launcher.num_processes
    tensors = num_bytes = statistics = 0
    for declared, iterations in _captured_maps(experiment, maps):
        iteration_price = price_of_iteration(experiment, declared, ranks)
        tensors += iterations * iteration_price.tensors
        num_bytes += iterations * iteration_price.num_bytes
        statistics += iterations * iteration_price.statistics
    return Price(tensors, num_bytes, statistics)


def price_of_iteration(experiment: Experiment, declared: PrecisionMap, num_processes: int) -> Price:
    """The captures of all processes in an iteration under a precision map; one process captures the weights."""
    indices = range(num_micro_batches_each(experiment))
    per_iteration = sum(takes_micro_batch(experiment.capture, i) for i in indices) * num_processes
    tensors = num_bytes = statistics = 0
    for alike, group in expected_alike(experiment, declared):
        for expected in group:
            times = alike if expected.once else alike * per_iteration
            is_file = expected.take.level is CaptureLevel.tensors and not expected.shared
            tensors += times * is_file
            num_bytes += times * expected.num_bytes
            statistics += times * (not expected.shared)
    return Price(tensors, num_bytes, statistics)


def _captured_maps(
    experiment: Experiment, maps: Sequence[PrecisionMap]
) -> Iterator[tuple[PrecisionMap, int]]:
    """The precision maps with captured iterations, and the number of those."""
    taken = captured_iterations(experiment.capture, experiment.training.iterations)
    bounds = [bisect_left(taken, start) for start in changes(experiment.quant)] + [len(taken)]
    for declared, (first, last) in zip(maps, pairwise(bounds), strict=True):
        if last > first:
            yield declared, last - first


def require_affordable(experiment: Experiment, root: Path) -> None:
    """Refuse a run whose capture exceeds `capture.max_gb` or the free disk space.

    Args:
        experiment: the experiment to run.
        root: the folder of its tensors unless `capture.dir` is set.

    Raises:
        CaptureError: with the size, the limit and the remedy.
    """
    size, max_gb = price(experiment), experiment.capture.max_gb
    if max_gb is not None and size.num_bytes > max_gb * 1e9:
        raise CaptureError(
            f"the capture would take {size.num_bytes / 1e9:.3g} GB in {size.tensors} tensors, and capture.max_gb "
            f"allows {max_gb:g}; {_REMEDY}, or raise capture.max_gb"
        )
    folder, free = free_where(experiment, root)
    if size.on_disk > free:
        raise CaptureError(
            f"the capture would take {size.on_disk / 1e9:.3g} GB with its lists, and {folder} has {free / 1e9:.3g} GB "
            f"free; {_REMEDY}, or set capture.dir to another disk"
        )


def require_affordable_together(runs: Sequence[tuple[Experiment, Path]]) -> None:
    """Refuse runs whose captures together exceed the free space of a disk.

    Args:
        runs: the experiments to run, each with the folder of its tensors unless `capture.dir` is set.

    Raises:
        CaptureError: with the size, the free space and the remedy.
    """
    sizes: dict[int, list[int]] = {}
    where: dict[int, tuple[Path, int]] = {}
    for experiment, root in runs:
        folder, free = free_where(experiment, root)
        disk = folder.stat().st_dev
        where.setdefault(disk, (folder, free))
        sizes.setdefault(disk, []).append(price(experiment).on_disk)
    for disk, (folder, free) in where.items():
        total = sum(sizes[disk])
        if total > free:
            raise CaptureError(
                f"the captures of {len(sizes[disk])} runs would take {total / 1e9:.3g} GB with their lists, and "
                f"{folder} has {free / 1e9:.3g} GB free; {_REMEDY}, or set capture.dir to another disk"
            )


def free_where(experiment: Experiment, root: Path) -> tuple[Path, int]:
    """The nearest existing parent of the tensors' folder, and the free bytes there."""
    folder = _existing(user_path(experiment.capture.dir or root).absolute())
    return folder, shutil.disk_usage(folder).free


_REMEDY = "capture fewer iterations or micro-batches, leave out tensors with capture.rules, set capture.sample_count"


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
