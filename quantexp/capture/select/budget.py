"""What a capture may take: told by the plan, refused before the launch where it is too much, and held while running.

The price is exact for the values. To it come the files' own framing and the lines of manifest and statistics, counted
here with `FRAMING_BYTES` for each tensor.
"""

from __future__ import annotations

import shutil
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from quantexp.capture.select.choice import expected_alike, takes_micro_batch
from quantexp.capture.select.schedule import captured_iterations
from quantexp.errors import CaptureError
from quantexp.model.sizes import num_micro_batches_each
from quantexp.quant.precision import PrecisionMap, changes, declared_maps
from quantexp.schema import CaptureLevel, Experiment

#: A file's framing, its share of a block of the file system, and two lines of JSON.
FRAMING_BYTES = 12_000


@dataclass(frozen=True)
class Price:
    """What a whole run captures."""

    #: Files with values, and what the values take.
    tensors: int
    num_bytes: int
    #: Tensors of which statistics are kept, those with values included.
    statistics: int

    @property
    def on_disk(self) -> int:
        """Bytes that the disk needs, at most."""
        return self.num_bytes + self.statistics * FRAMING_BYTES


def price(experiment: Experiment, maps: Sequence[PrecisionMap] | None = None) -> Price:
    """The price of an experiment's capture, from its configuration alone; `maps` are its `declared_maps`."""
    if maps is None:
        maps = declared_maps(experiment.model, experiment.quant)
    ranks = experiment.launcher.num_processes
    tensors = num_bytes = statistics = 0
    for declared, iterations in _stretches(experiment, maps):
        found = price_of_iteration(experiment, declared, ranks)
        tensors += iterations * found.tensors
        num_bytes += iterations * found.num_bytes
        statistics += iterations * found.statistics
    return Price(tensors, num_bytes, statistics)


def price_of_iteration(experiment: Experiment, declared: PrecisionMap, num_processes: int) -> Price:
    """What so many processes capture in an iteration under a precision map; weights are captured by one of them."""
    indices = range(num_micro_batches_each(experiment))
    each = sum(takes_micro_batch(experiment.capture, i) for i in indices) * num_processes
    tensors = num_bytes = statistics = 0
    for alike, given in expected_alike(experiment, declared):
        for expected in given:
            times = alike if expected.once else alike * each
            is_file = expected.take.level is CaptureLevel.tensors and not expected.shared
            tensors += times * is_file
            num_bytes += times * expected.num_bytes
            statistics += times * (not expected.shared)
    return Price(tensors, num_bytes, statistics)


def _stretches(
    experiment: Experiment, maps: Sequence[PrecisionMap]
) -> Iterator[tuple[PrecisionMap, int]]:
    """The precision maps under which anything is captured, and in how many iterations."""
    taken = captured_iterations(experiment.capture, experiment.training.iterations)
    bounds = [bisect_left(taken, start) for start in changes(experiment.quant)] + [len(taken)]
    for declared, (first, last) in zip(maps, pairwise(bounds), strict=True):
        if last > first:
            yield declared, last - first


def require_affordable(experiment: Experiment, root: Path) -> None:
    """Refuse a run whose capture is over `capture.max_gb`, or over what is free where it is to go.

    Args:
        experiment: what is to run.
        root: where its tensors go unless `capture.dir` says otherwise.

    Raises:
        CaptureError: with the price, the bound and what to change.
    """
    asked, most = price(experiment), experiment.capture.max_gb
    if most is not None and asked.num_bytes > most * 1e9:
        raise CaptureError(
            f"the capture would take {asked.num_bytes / 1e9:.3g} GB in {asked.tensors} tensors, and capture.max_gb "
            f"allows {most:g}; {_REMEDY}, or raise capture.max_gb"
        )
    folder, free = free_where(experiment, root)
    if asked.on_disk > free:
        raise CaptureError(
            f"the capture would take {asked.on_disk / 1e9:.3g} GB with its lists, and {folder} has {free / 1e9:.3g} GB "
            f"free; {_REMEDY}, or set capture.dir to another disk"
        )


def require_affordable_together(runs: Sequence[tuple[Experiment, Path]]) -> None:
    """Refuse runs whose captures together are over what is free on a disk where they are to go.

    Args:
        runs: what is to run, each with the folder where its tensors go unless `capture.dir` says otherwise.

    Raises:
        CaptureError: with the price, what is free and what to change.
    """
    asked: dict[int, list[int]] = {}
    where: dict[int, tuple[Path, int]] = {}
    for experiment, root in runs:
        folder, free = free_where(experiment, root)
        disk = folder.stat().st_dev
        where.setdefault(disk, (folder, free))
        asked.setdefault(disk, []).append(price(experiment).on_disk)
    for disk, (folder, free) in where.items():
        total = sum(asked[disk])
        if total > free:
            raise CaptureError(
                f"the captures of {len(asked[disk])} runs would take {total / 1e9:.3g} GB with their lists, and "
                f"{folder} has {free / 1e9:.3g} GB free; {_REMEDY}, or set capture.dir to another disk"
            )


def free_where(experiment: Experiment, root: Path) -> tuple[Path, int]:
    """The folder that exists nearest to where tensors go, and the bytes that are free there."""
    folder = _existing(Path(experiment.capture.dir or root).expanduser().absolute())
    return folder, shutil.disk_usage(folder).free


_REMEDY = "capture fewer iterations or micro-batches, leave out tensors with capture.rules, set capture.sample_count"


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
