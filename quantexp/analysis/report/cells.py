"""Numerics by layer: what the manifest says of each captured tensor, laid out as rows by layers.

The report opens no tensor whose statistics were captured. Where there are values without statistics, or values of a
quantised operand that no `capture.format` judged, a bounded sample of them is looked at (`quantexp.analysis.survey`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantexp.analysis.compare.gap import milestones
from quantexp.analysis.inventory import in_flow
from quantexp.analysis.report.deadline import Deadline
from quantexp.analysis.report.lines import Lines, lines_with_room
from quantexp.analysis.report.sampled import operands_of, statistics_of
from quantexp.capture.reader import CapturedTensor
from quantexp.errors import CaptureError
from quantexp.paths import RunDir

#: Cells of all runs of a report together: what keeps ten schemes below 10 MB.
MAX_CELLS = 10_000
#: Significant digits of a number.
_DIGITS = 6

_Place = tuple[int, tuple[str, str, str], int]


@dataclass
class Numerics:
    """The heatmap of one run; `cells` are [iteration, row, layer, content], each an index."""

    iterations: list[int] = field(default_factory=list)
    #: Operation, module and tensor.
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    cells: list[list[Any]] = field(default_factory=list)
    #: What is not shown, and why.
    notes: list[str] = field(default_factory=list)


def numerics(run: RunDir, capture_dir: str | None, max_cells: int, deadline: Deadline) -> Numerics:
    """The cells of a run's captured tensors, at most `max_cells` (but one row and layer)."""
    folder, name = run.captured(capture_dir), run.root.name
    if not folder.is_dir():
        return Numerics()
    try:
        lines = lines_with_room(folder, max_cells, deadline)
    except CaptureError as error:
        return Numerics(notes=[str(error)])
    places, repeated = _places(lines.entries)
    found = Numerics()
    if lines.is_cut:
        found.notes.append(
            f"read up to iteration {lines.found[-1]}: quantexp report {name} reads all"
        )
    if repeated:
        found.notes.append(
            f"{repeated} tensors of other micro-batches and ranks are not shown: each cell is the first micro-batch "
            "of the first rank"
        )
    _choose(found, list(places), lines, max_cells)
    rows = {row: i for i, row in enumerate(found.rows)}
    late = 0
    for (iteration, row, layer), entry in places.items():
        if iteration in found.iterations and row in rows and layer in found.layers:
            is_late, content = _cell(entry, deadline)
            late += is_late
            place = [found.iterations.index(iteration), rows[row], found.layers.index(layer)]
            found.cells.append([*place, content])
    if late:
        found.notes.append(
            f"of {late} tensors SQNR, underflow and saturation are left out: quantexp report {name} takes "
            "the time to look at their values"
        )
    return found


def _places(entries: Sequence[CapturedTensor]) -> tuple[dict[_Place, CapturedTensor], int]:
    """One tensor for each place of the heatmap, and how many share a place with it."""
    places: dict[_Place, CapturedTensor] = {}
    repeated = 0
    for entry in sorted(entries, key=_first_micro_batch):
        known = entry.metadata
        layer = known.get("layer")
        if not isinstance(layer, int):
            continue
        row = tuple(str(known.get(key) or "-") for key in ("operation", "module", "tensor"))
        place = (int(known.get("iteration") or 0), (row[0], row[1], row[2]), layer)
        repeated += place in places
        places.setdefault(place, entry)
    return places, repeated


def _first_micro_batch(entry: CapturedTensor) -> tuple[int, int]:
    return int(entry.metadata.get("rank") or 0), int(entry.metadata.get("micro_batch") or 0)


def _choose(found: Numerics, places: Sequence[_Place], lines: Lines, max_cells: int) -> None:
    """Rows, layers and iterations that have room, evenly spread, with a note on what has none."""
    iterations = tuple(sorted({place[0] for place in places}))
    layers = tuple(sorted({place[2] for place in places}))
    rows = _in_order({place[1]: None for place in places})
    found.rows = rows[: max(1, max_cells // 2)]
    found.layers = _spread(layers, max_cells // max(1, len(found.rows)))
    each = max(1, len(found.rows) * len(found.layers))
    found.iterations = _spread(iterations, max_cells // each)
    for shown, there, what in (
        (found.rows, rows, "tensors of a layer"),
        (found.layers, layers, "layers"),
        (found.iterations, lines.found, "iterations"),
    ):
        if len(shown) < len(there):
            found.notes.append(
                f"{len(shown)} of {len(there)} {what} are shown, to keep the page small"
            )


def _spread(numbers: tuple[int, ...], count: int) -> list[int]:
    return milestones(numbers, count) if count > 1 else list(numbers[:1])


def _in_order(rows: Mapping[tuple[str, str, str], None]) -> list[tuple[str, str, str]]:
    """Forward before backward, modules as data flows, tensors as they were captured."""
    flow = {module: i for i, module in enumerate(in_flow(row[1] for row in rows))}
    order = {"forward": 0, "backward": 1}
    return sorted(rows, key=lambda row: (order.get(row[0], 2), flow[row[1]]))


def _cell(entry: CapturedTensor, deadline: Deadline) -> tuple[bool, dict[str, Any]]:
    """A cell, and whether its values were not looked at for want of time."""
    known = entry.metadata
    given = known.get("statistics")
    sampled, late = 0, False
    statistics: Mapping[str, Any] = given if isinstance(given, dict) else {}
    has_values = bool(known.get("file"))
    if not statistics and has_values and not (late := deadline.passed):
        sampled, statistics = statistics_of(entry)
    operands = _judged(statistics)
    if not operands and has_values and not (late := late or deadline.passed):
        operands = operands_of(entry)
    return late and _is_quantised(known), _content(entry, statistics, operands, sampled)


def _is_quantised(known: Mapping[str, Any]) -> bool:
    formats = known.get("formats") or {}
    return any(isinstance(f, dict) and f.get("format") != "bf16" for f in formats.values())


def _judged(statistics: Mapping[str, Any]) -> list[list[Any]]:
    """What `capture.format` says: name, SQNR, underflow, saturation."""
    fidelity = statistics.get("fidelity")
    if not isinstance(fidelity, dict):
        return []
    name = f"capture.format {fidelity.get('format')}"
    keys = ("sqnr_db", "underflow_share", "saturated_share")
    return [[name, *(_short(fidelity.get(key)) for key in keys)]]


def _content(
    entry: CapturedTensor,
    statistics: Mapping[str, Any],
    operands: list[list[Any]],
    sampled: int,
) -> dict[str, Any]:
    """What the page shows of a tensor; the worst of its operands stands for it."""
    counts = statistics.get("log2_magnitude") or {}
    keys = (
        "count",
        "abs_max",
        "kurtosis",
        "zero_share",
        "mean",
        "std",
        "min",
        "max",
        "skew",
        "nonfinite",
    )
    content = {key: _short(statistics.get(key)) for key in keys}
    outside = [counts.get(side) or 0 for side in ("below", "above")]
    worst = [[v for o in operands if (v := o[i]) is not None] for i in (1, 2, 3)]
    return {
        **{key: value for key, value in content.items() if value is not None},
        "dtype": str(entry.metadata.get("dtype") or ""),
        "shape": " x ".join(map(str, entry.metadata.get("shape") or ())),
        "sqnr_db": min(worst[0], default=None),
        "underflow_share": max(worst[1], default=None),
        "saturated_share": max(worst[2], default=None),
        "operands": operands,
        "sampled": sampled,
        "bins": [counts.get("first"), counts.get("counts") or [], *outside],
    }


def _short(value: Any) -> float | int | None:
    """A number with as many digits as are looked at; None where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
