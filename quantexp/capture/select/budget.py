"""The size of a capture: shown by the plan, checked against the budget before the launch, and enforced at run time.

The size of the values is exact. The files' framing and the lines of manifest and statistics add `FRAMING_BYTES` for
each tensor.
"""

from __future__ import annotations

import os
import shutil
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

from quantexp.capture.division import WEIGHT_LIKE, Holder
from quantexp.capture.operands import source_of
from quantexp.capture.select.choice import Expected, expected_alike, takes_micro_batch
from quantexp.capture.select.schedule import captured_iterations
from quantexp.errors import CaptureError
from quantexp.folders import existing, user_path
from quantexp.model.decoder import OUTPUT, is_routed
from quantexp.model.sizes import num_micro_batches_each
from quantexp.quant.precision import PrecisionMap, declared_maps
from quantexp.quant.rules import changes
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
    tensors = num_bytes = statistics = 0
    for declared, iterations in _captured_maps(experiment, maps):
        iteration_price = price_of_iteration(experiment, declared)
        tensors += iterations * iteration_price.tensors
        num_bytes += iterations * iteration_price.num_bytes
        statistics += iterations * iteration_price.statistics
    return Price(tensors, num_bytes, statistics)


def price_of_iteration(experiment: Experiment, declared: PrecisionMap) -> Price:
    """The captures of all processes in an iteration under a precision map; of ranks that hold a tensor alike, one."""
    holder, per_iteration = Holder.of(experiment, 0), _micro_batches(experiment)
    tensors = num_bytes = statistics = 0
    for alike, group in expected_alike(experiment, declared):
        for expected in group:
            copies = _copies(expected, holder, per_iteration)
            is_file = expected.take.level is CaptureLevel.tensors and not expected.shared
            tensors += alike * copies.parts * is_file
            num_bytes += alike * copies.bytes_times * _whole_bytes(expected, holder)
            statistics += alike * copies.parts * (not expected.shared)
    return Price(tensors, num_bytes, statistics)


def rank_bytes_of_iteration(experiment: Experiment, declared: PrecisionMap) -> int:
    """The bytes that a rank captures in an iteration, with layers and experts spread evenly over ranks.

    The output layer, if it is captured, is counted whole: the last stage has it.
    """
    holder, per_iteration = Holder.of(experiment, 0), _micro_batches(experiment)
    layout, num_bytes = holder.layout, 0
    for alike, group in expected_alike(experiment, declared):
        for expected in group:
            module = expected.module.name
            times = alike if expected.once else alike * per_iteration
            divided = 1 if module == OUTPUT else layout.pipeline
            divided *= layout.expert if is_routed(module) else 1
            for split in holder.splits(module, expected.tensor):
                divided *= split.size if split.axis is not None else 1
            num_bytes += -(-times * expected.num_bytes // divided)
    return num_bytes


class _Copies(NamedTuple):
    """How often the ranks store a tensor in an iteration: in how many parts, and how often its bytes."""

    parts: int
    bytes_times: int


def _copies(expected: Expected, holder: Holder, per_iteration: int) -> _Copies:
    module, layout = expected.module.name, holder.layout
    splits = holder.splits(module, expected.tensor)
    num_parts = prod(split.size for split in splits if not split.is_alike)
    num_summands = prod(split.size for split in splits if split.is_sum)
    if expected.once:
        return _Copies(num_parts, num_summands)
    groups = layout.expert_data if is_routed(module) else layout.data
    # The tokens of all micro-batches are spread over the groups of ranks; each group has a weight gradient.
    times = groups if source_of(expected.tensor) in WEIGHT_LIKE else layout.data
    return _Copies(per_iteration * groups * num_parts, per_iteration * times * num_summands)


def _whole_bytes(expected: Expected, holder: Holder) -> int:
    """The bytes of all parts of a tensor; more than those of the whole where parts have their own short last blocks."""
    if expected.scales_of is None or expected.num_bytes == 0:
        return expected.num_bytes
    operand, shape = expected.quantised, expected.scales_of
    assert operand is not None
    assert operand.block is not None
    module = expected.module.name
    part = holder.part(module, expected.tensor, holder.local_shape(module, expected.tensor, shape))
    whole = part.in_blocks(operand.dim(len(shape)), operand.block).whole
    return replace(expected, shape=whole).num_bytes


def _micro_batches(experiment: Experiment) -> int:
    """The captured micro-batches of one data-parallel rank in an iteration."""
    indices = range(num_micro_batches_each(experiment))
    return sum(takes_micro_batch(experiment.capture, index) for index in indices)


def _captured_maps(
    experiment: Experiment, maps: Sequence[PrecisionMap]
) -> Iterator[tuple[PrecisionMap, int]]:
    """The precision maps with captured iterations, and the number of those, while no rule's condition is met."""
    taken = captured_iterations(experiment.capture, experiment.training.last_iteration)
    bounds = [bisect_left(taken, start) for start in changes(experiment.quant)] + [len(taken)]
    for declared, (first, last) in zip(maps, pairwise(bounds), strict=False):
        if last > first:
            yield declared, last - first


def require_affordable(experiment: Experiment, root: Path) -> None:
    """Refuse a run whose capture exceeds `capture.max_gb` or the free disk space, or cannot be written.

    Args:
        experiment: the experiment to run.
        root: the folder of its tensors unless `capture.dir` is set.

    Raises:
        CaptureError: with the size and the limit, or the folder, and the remedy.
    """
    size, max_gb = price(experiment), experiment.capture.max_gb
    if max_gb is not None and size.num_bytes > max_gb * 1e9:
        raise CaptureError(
            f"the capture would take {size.num_bytes / 1e9:.3g} GB in {size.tensors} tensors, and capture.max_gb "
            f"allows {max_gb:g}; {_REMEDY}, or raise capture.max_gb"
        )
    folder, free = free_where(experiment, root)
    if experiment.capture.dir and size.on_disk:
        reason = "Permission denied" if folder.is_dir() else "Not a directory"
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise CaptureError(
                f"captured tensors cannot be written to capture.dir={experiment.capture.dir}: {folder}: {reason}; "
                "give another folder"
            )
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
    folder = existing(user_path(experiment.capture.dir or root).absolute())
    return folder, shutil.disk_usage(folder).free


_REMEDY = "capture fewer iterations or micro-batches, leave out tensors with capture.rules, set capture.sample_count"
