"""The dossiers of a run in the report: what moved first, the data, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from quantexp.capture.lines import samples_of
from quantexp.errors import UnreadableError
from quantexp.extras.forensics.moved import Series, moved_first
from quantexp.folders import for_shell, short_path
from quantexp.model.checkpoints import folder_of as checkpoint_folder
from quantexp.runs.dossiers import Dossier, folder_of, read_dossiers
from quantexp.runs.metrics import read_metrics
from quantexp.runs.paths import RunDir
from quantexp.terminal.units import human_bytes

#: Rows of what moved, samples of the data, and characters of each.
_MOST_ROWS, _MOST_SAMPLES, _MOST_TEXT = 20, 8, 400
#: Width and height of a drawn series.
WIDTH, HEIGHT = 132, 26
#: A margin for the ends of the line.
_MARGIN = 2.0


@dataclass(frozen=True)
class Sparkline:
    """A series as SVG draws it: x to the right, y downwards."""

    points: str
    #: The band's upper edge and its height; None without one.
    band: tuple[float, float] | None = None
    #: Where the series left its band.
    left_x: float | None = None


@dataclass(frozen=True)
class Row:
    """A series of the table."""

    where: str
    statistic: str
    left_at: int | None
    before: str
    last: str
    line: Sparkline


@dataclass(frozen=True)
class Text:
    """A sample of the data."""

    iteration: int
    index: int
    text: str


@dataclass(frozen=True)
class Shown:
    """A dossier on the page."""

    dossier: Dossier
    folder: str
    #: Loss and gradient norm in the ring's iterations.
    metrics: Sequence[Row]
    moved: Sequence[Row]
    #: Series that moved and are not shown.
    more: int
    texts: Sequence[Text]
    facts: Sequence[tuple[str, str]]
    #: Width and height of a drawn series.
    size: tuple[int, int] = (WIDTH, HEIGHT)


def shown_dossiers(run: RunDir) -> list[Shown]:
    """The dossiers of a run, the newest first."""
    dossiers = list(read_dossiers(run))
    return [_shown(run, dossier) for dossier in reversed(dossiers)]


def _shown(run: RunDir, dossier: Dossier) -> Shown:
    folder = folder_of(run, dossier.iteration)
    moved = moved_first(folder, dossier.iteration)
    rows = [_row(series) for series in moved[:_MOST_ROWS]]
    return Shown(
        dossier,
        str(short_path(folder)),
        _metrics(run, dossier),
        rows,
        len(moved) - len(rows),
        list(_texts(folder, dossier.iteration)),
        _facts(run, dossier),
    )


def _facts(run: RunDir, dossier: Dossier) -> list[tuple[str, str]]:
    ring, whole, checkpoint = dossier.ring, dossier.whole_iteration, dossier.checkpoint
    folder = for_shell(folder_of(run, dossier.iteration))
    rows = {
        "when": f"after iteration {dossier.iteration}, {dossier.time[:19].replace('T', ' ')} UTC",
        "statistics": "none (capture.ring holds them)"
        if ring is None
        else f"all sites, iterations {ring[0]} to {ring[-1]}",
        "values": "none"
        if whole is None
        else f"{dossier.tensors} tensors of iteration {whole}, {human_bytes(dossier.num_bytes)}",
        "nearest checkpoint": "none with a training state before it (checkpoint.every, checkpoint.optimizer=true)"
        if checkpoint is None
        else f"iteration {checkpoint}, {short_path(checkpoint_folder(run, checkpoint))}",
        "draw": f"quantexp draw {folder}",
        "all tensors": f"quantexp captures {folder} --list",
    }
    return list(rows.items())


def _metrics(run: RunDir, dossier: Dossier) -> list[Row]:
    """Loss and gradient norm in the iterations of the ring."""
    if dossier.ring is None:
        return []
    try:
        lines = [m for m in read_metrics(run) if m["iteration"] <= dossier.iteration]
    except UnreadableError:
        return []
    lines = [line for line in lines if line["iteration"] >= dossier.ring[0]]
    rows = []
    for name, key in (("loss", "loss"), ("gradient norm", "grad_norm")):
        values = [math.nan if line.get(key) is None else float(line[key]) for line in lines]
        if len(values) > 1 and any(key in line for line in lines):
            rows.append(
                Row("run", name, None, number(values[0]), number(values[-1]), sparkline(values))
            )
    return rows


def _row(series: Series) -> Row:
    middle = (series.low + series.high) / 2
    line = sparkline(series.values, (series.low, series.high))
    if series.left_at is not None:
        x = _x(series.iterations.index(series.left_at), len(series.values))
        line = replace(line, left_x=x)
    return Row(
        f"{series.where}",
        series.statistic,
        series.left_at,
        number(middle),
        number(series.values[-1]),
        line,
    )


def sparkline(values: Sequence[float], band: tuple[float, float] | None = None) -> Sparkline:
    """The line of a series; values that are not finite break it. The band is cut to what the values need."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if band is not None:
        width = band[1] - band[0]
        low, high = min(low, band[0] + width / 4), max(high, band[1] - width / 4)
    scale = (HEIGHT - 2 * _MARGIN) / ((high - low) or 1.0)

    def y(value: float) -> float:
        return HEIGHT - _MARGIN - (value - low) * scale

    points, pen = [], "M"
    for index, value in enumerate(values):
        if not math.isfinite(value):
            pen = "M"
            continue
        points.append(f"{pen}{_x(index, len(values)):.1f} {y(value):.1f}")
        pen = "L"
    if band is None:
        return Sparkline(" ".join(points))
    top, bottom = max(0.0, y(band[1])), min(float(HEIGHT), y(band[0]))
    return Sparkline(" ".join(points), (round(top, 1), round(max(0.0, bottom - top), 1)))


def _x(index: int, count: int) -> float:
    return _MARGIN + index * (WIDTH - 2 * _MARGIN) / max(1, count - 1)


def number(value: float) -> str:
    """A value with four digits."""
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def _texts(folder: Path, iteration: int) -> Iterable[Text]:
    """The samples of the iteration, decoded."""
    of_iteration = (
        Text(iteration, sample.index, _decoded(sample.text(i) for i in range(len(sample.ids))))
        for key, samples in sorted(samples_of(folder).items())
        if key[0] == iteration
        for sample in samples
    )
    return islice(of_iteration, _MOST_SAMPLES)


def _decoded(texts: Iterable[str]) -> str:
    words = ""
    for text in texts:
        words += text
        if len(words) > _MOST_TEXT:
            return words[:_MOST_TEXT] + " ..."
    return words
