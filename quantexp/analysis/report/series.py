"""The losses in the report: thinned without losing spikes, with a running mean for long runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.analysis.compare.gap import Values, running_mean, window_of
from quantexp.analysis.compare.lines import Band, Line

#: Iterations and values, as many of each.
XY = tuple[NDArray[np.int64], Values]
#: Maximum points of a line, about the resolution of a screen.
MAX_POINTS = 800


def series(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """For each scheme its line, gap, band over seeds, and style."""
    return [
        {
            "label": line.label,
            "colour": line.style.colour,
            "dash": list(line.style.dash),
            "baseline": line.is_baseline,
            "loss": _band(line.losses),
            "gap": _band(line.gaps),
        }
        for line in lines
    ]


def _band(band: Band) -> dict[str, Any]:
    line = drawn((np.array(band.iterations), np.array(band.mean)))
    if band.low == band.high:
        return {**line, "band": None}
    step = max(1, len(band.iterations) // (MAX_POINTS // 2))
    kept = range(0, len(band.iterations), step)
    return {
        **line,
        "band": [[of[i] for i in kept] for of in (band.iterations, band.low, band.high)],
    }


def drawn(line: XY, digits: int | None = None) -> dict[str, Any]:
    """Points and, if there are many, their running mean with its window; a window of 1 means no mean.

    `digits` are those of the values; None: all.
    """
    x, y = line
    window, mean = window_of(len(y)), (x[:0], y[:0])
    if window > 1:
        step = max(1, len(y) // (MAX_POINTS // 2))
        places = np.append(np.arange(0, len(y) - 1, step), len(y) - 1)
        mean = x[places], running_mean(y, window)[places]
    return {
        "points": _listed(_thinned(line), digits),
        "mean": _listed(mean, digits),
        "window": window,
    }


def _listed(line: XY, digits: int | None) -> list[list[Any]]:
    x, y = line[0].tolist(), line[1].tolist()
    return [x, y if digits is None else [float(f"{value:.{digits}g}") for value in y]]


def _thinned(line: XY) -> XY:
    """All points, or the minimum and maximum of each of `MAX_POINTS`/2 segments, in order, and both ends."""
    x, y = line
    if len(x) <= MAX_POINTS:
        return line
    num_segments = MAX_POINTS // 2 - 1
    starts = np.arange(num_segments + 1) * len(x) // num_segments
    kept = {0, len(x) - 1}
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        segment = y[start:end]
        kept |= {start + int(segment.argmin()), start + int(segment.argmax())}
    places = sorted(kept)
    return x[places], y[places]
