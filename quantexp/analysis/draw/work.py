"""The work on one tensor in a worker process: reads it once, draws its figures, and returns its measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantexp.analysis.measures.counted import CountedTensor, StatisticsOnly
from quantexp.analysis.measures.row import TensorRow, Wanted, read_row
from quantexp.analysis.tree import DISTRIBUTIONS, HEATMAPS
from quantexp.capture.reader import CapturedTensor


@dataclass(frozen=True)
class Task:
    """One tensor, its wanted measures and the requested figures."""

    entry: CapturedTensor
    #: The name of the run or folder.
    source: str
    wanted: Wanted
    #: Folder -> path of the figure without suffix.
    stems: Mapping[str, Path]
    formats: tuple[str, ...]


def do(task: Task) -> TensorRow:
    """Read, measure, draw.

    Raises:
        CaptureError: the file cannot be used.
        OSError: a figure cannot be written.
    """
    row, tensor = read_row(task.entry, task.wanted)
    if isinstance(tensor, StatisticsOnly) and DISTRIBUTIONS in task.stems:
        from quantexp.analysis.draw.statistics_only_figure import draw_statistics_only
        from quantexp.analysis.style import save_figure

        figure = draw_statistics_only(tensor, task.source)
        save_figure(figure, task.stems[DISTRIBUTIONS], task.formats, one_of_many=True)
    elif isinstance(tensor, CountedTensor) and task.stems:
        _draw(task, tensor)
    return row


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
