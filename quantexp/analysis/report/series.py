"""The losses in the report: thinned without losing spikes, with a running mean for long runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantexp.analysis.compare.lines import Band, Line
from quantexp.analysis.compare.running_mean import running_mean, window_of

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
    line = _line(band.iterations, band.mean)
    if band.low == band.high:
        return {**line, "band": None}
    step = max(1, len(band.iterations) // (MAX_POINTS // 2))
    kept = range(0, len(band.iterations), step)
    return {
        **line,
        "band": [[of[i] for i in kept] for of in (band.iterations, band.low, band.high)],
    }


def _line(x: Sequence[int], y: Sequence[float]) -> dict[str, Any]:
    """Points and, if there are many, their running mean with its window; a window of 1 means no mean."""
    window = window_of(len(y))
    mean = running_mean(y, window) if window > 1 else []
    step = max(1, len(mean) // (MAX_POINTS // 2))
    kept = [i for i in range(len(mean)) if i % step == 0 or i == len(mean) - 1]
    return {
        "points": thinned(x, y),
        "mean": [[x[i] for i in kept], [mean[i] for i in kept]],
        "window": window,
    }


def thinned(x: Sequence[int], y: Sequence[float], limit: int = MAX_POINTS) -> list[list[float]]:
    """All points, or the minimum and maximum of each of `limit`/2 segments, in order, and both ends."""
    if len(x) <= limit:
        return [list(x), list(y)]
    kept = {0, len(x) - 1}
    num_stretches = limit // 2 - 1
    for i in range(num_stretches):
        stretch = range(i * len(x) // num_stretches, (i + 1) * len(x) // num_stretches)
        kept |= {min(stretch, key=y.__getitem__), max(stretch, key=y.__getitem__)}
    return [[x[i] for i in sorted(kept)], [y[i] for i in sorted(kept)]]
