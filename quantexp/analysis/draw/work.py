"""The work on one tensor in a worker process: reads it once, draws its figures, and returns its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp.analysis.draw.look import CountedTensor, look_at
from quantexp.analysis.draw.statistics_only import StatisticsOnly
from quantexp.analysis.tree import DISTRIBUTIONS, HEATMAPS
from quantexp.capture.reader import CapturedTensor


@dataclass(frozen=True)
class Task:
    """One tensor and the requested figures."""

    entry: CapturedTensor
    #: The name of the run or folder.
    source: str
    #: Folder -> path of the figure without suffix; empty for statistics only.
    stems: Mapping[str, Path]
    formats: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """The result for a tensor."""

    #: Statistics, shape and dtype.
    record: dict[str, Any]
    #: `empty`, `all zero`, ...; None for an ordinary tensor.
    finding: str | None


def do(task: Task) -> Done:
    """Read, count, draw.

    Raises:
        CaptureError: the file cannot be used.
        OSError: a figure cannot be written.
    """
    if not task.entry.metadata.get("file"):
        return _of_statistics(task)
    counted_tensor = look_at(task.entry)
    if task.stems:
        _draw(task, counted_tensor)
    return Done(counted_tensor.record, counted_tensor.finding)


def _of_statistics(task: Task) -> Done:
    statistics = StatisticsOnly.of(task.entry)
    if DISTRIBUTIONS in task.stems:
        from quantexp.analysis.draw.statistics_only_figure import draw_statistics_only
        from quantexp.analysis.style import save_figure

        figure = draw_statistics_only(statistics, task.source)
        save_figure(figure, task.stems[DISTRIBUTIONS], task.formats, one_of_many=True)
    return Done(statistics.record, statistics.finding)


def _draw(task: Task, counted_tensor: CountedTensor) -> None:
    """Import the drawing code only when a figure is drawn, because the import takes as long as a thousand tensors."""
    from quantexp.analysis.draw.distribution import draw_distribution
    from quantexp.analysis.draw.grids import grids_of
    from quantexp.analysis.draw.heatmap import draw_heatmap
    from quantexp.analysis.style import save_figure

    if DISTRIBUTIONS in task.stems:
        grids = grids_of(
            task.entry.metadata, counted_tensor.values, counted_tensor.record["abs_max"]
        )
        figure = draw_distribution(counted_tensor, grids, task.source)
        save_figure(figure, task.stems[DISTRIBUTIONS], task.formats, one_of_many=True)
    if HEATMAPS in task.stems:
        figure = draw_heatmap(counted_tensor, task.source)
        save_figure(figure, task.stems[HEATMAPS], task.formats, one_of_many=True)
