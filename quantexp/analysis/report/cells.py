"""Numerics by layer: a map of captured tensors and their slots, rows by layers.

    rows of tensors   qkv input, qkv weight, ...          magnitudes: amax, kurtosis, zeros, the histogram
    rows of slots     qkv x fprop, qkv x wgrad, ...       what the format loses: SQNR, underflow, saturation

A slot without a number has a state that says why. The experts of a layer share a row: it shows the worst of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantexp.analysis.compare.gap import milestones
from quantexp.analysis.quick.first_look import ASSUMED
from quantexp.analysis.report.experts import slots_together, tensors_together
from quantexp.analysis.report.judged import Deadline, Judge
from quantexp.analysis.report.slots import BACKWARD, FORWARD, SlotCell, State, place_of_slot
from quantexp.analysis.tensors.place import experts_as_one, in_flow
from quantexp.capture.lines import IterationIndex, unlisted
from quantexp.capture.reader import CapturedTensor, open_capture, together
from quantexp.capture.store.manifest import MANIFEST, STATISTICS
from quantexp.errors import CaptureError
from quantexp.folders import shell_word
from quantexp.model.decoder import OUTPUT
from quantexp.runs.paths import RunDir

#: Maximum cells of tensors in all runs of a report, which keeps ten schemes below 10 MB.
MAX_CELLS = 10_000


@dataclass(frozen=True)
class Row:
    """A row of the map."""

    #: forward or backward; for a slot, the pass of its product.
    operation: str
    #: The module, with all experts as one.
    module: str
    #: `input`, or `x fprop` for a slot.
    name: str
    is_slot: bool = False


@dataclass
class Numerics:
    """The map of one run; `cells` are [iteration, row, layer, content], all of them indices."""

    iterations: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    #: Numbers; `output` for the output layer.
    layers: list[int | str] = field(default_factory=list)
    cells: list[list[Any]] = field(default_factory=list)
    #: Notes on the numbers and on omitted parts.
    notes: list[str] = field(default_factory=list)


#: Iteration, row and layer.
_Place = tuple[int, Row, int]


def numerics(run: RunDir, capture_dir: str | None, max_cells: int, deadline: Deadline) -> Numerics:
    """The cells of a run's captured tensors, at most `max_cells` (but at least one row and layer)."""
    folder = run.captured(capture_dir)
    if not folder.is_dir():
        return Numerics()
    try:
        lines = lines_with_room(folder, max_cells, deadline)
    except CaptureError as error:
        return Numerics(notes=[str(error)])
    return numerics_of(run, lines, max_cells, deadline)


def numerics_of(run: RunDir, lines: Lines, max_cells: int, deadline: Deadline) -> Numerics:
    """The cells of lines that have been read, as `numerics` gives them."""
    name = shell_word(run.root.name)
    content = Numerics(notes=[f"left out: {words}" for words in lines.damage])
    if lines.is_cut:
        content.notes.append(
            f"read up to iteration {lines.iterations[-1]}: quantexp report {name} reads all"
        )
    tensors, repeated = _first_of_each(lines.entries)
    places = {_place(entry): None for entry in tensors}
    _choose(content, list(places), lines, max_cells)
    kept = {*content.rows}
    shown = [
        entry
        for entry in tensors
        if (place := _place(entry))[0] in content.iterations
        and place[1] in kept
        and place[2] in content.layers
    ]
    judge = Judge(run, shown, deadline)
    _fill(content, shown, judge)
    beyond = {place[2] for place in places if place[1].module == OUTPUT}
    content.layers = [OUTPUT if layer in beyond else layer for layer in content.layers]
    content.notes += _remarks(content, shown, judge, name)
    if repeated:
        content.notes.append(
            f"{repeated} tensors of other micro-batches and ranks are not shown: each cell is the first micro-batch "
            "of the first rank"
        )
    return content


def _remarks(
    content: Numerics, shown: Sequence[CapturedTensor], judge: Judge, name: str
) -> Iterator[str]:
    """Notes on how slots were judged, or why they were not."""
    if judge.is_assumed and any(entry.metadata.get("file") for entry in shown):
        yield (
            "this run quantises nothing: SQNR, underflow and saturation are what its operands would lose in "
            f"{ASSUMED}"
        )
    if any(cell[3].get("state") == State.STATISTICS for cell in content.cells):
        yield (
            "statistics alone were captured: SQNR, underflow and saturation need values (capture=tensors) or a format "
            "that judges while training runs (capture.format=mxfp8)"
        )
    if judge.num_late:
        yield f"{judge.num_late} tensors were not judged for want of time: quantexp report {name} judges them"


def _fill(numerics: Numerics, shown: Sequence[CapturedTensor], judge: Judge) -> None:
    """Add the cells of tensors and, below them, of their slots."""
    tensors: dict[_Place, list[tuple[str, dict[str, Any]]]] = {}
    slots: dict[_Place, list[tuple[str, SlotCell]]] = {}
    of: dict[Row, Row] = {}
    for entry in shown:
        iteration, row, layer = place = _place(entry)
        module = str(entry.metadata.get("module"))
        tensors.setdefault(place, []).append((module, judge.tensor(entry)))
        for slot in judge.slots(entry):
            slot_row = Row(slot.operation, row.module, slot.name, is_slot=True)
            there = slots.setdefault((iteration, slot_row, layer), [])
            if module not in (other for other, _ in there):
                there.append((module, slot))
                of.setdefault(slot_row, row)
    numerics.rows += _in_order_of_products({place[1] for place in slots})
    numbers = {row: i for i, row in enumerate(numerics.rows)}

    def add(place: _Place, content: dict[str, Any]) -> None:
        iteration, row, layer = place
        indices = [numerics.iterations.index(iteration), numbers[row], numerics.layers.index(layer)]
        numerics.cells.append([*indices, content])

    for place, contents in tensors.items():
        add(place, tensors_together(contents))
    for place, alike in slots.items():
        add(place, {"of": numbers[of[place[1]]], **slots_together(alike)})


def _place(entry: CapturedTensor) -> _Place:
    known = entry.metadata
    operation, module, tensor = (
        str(known.get(key) or "-") for key in ("operation", "module", "tensor")
    )
    layer = known.get("layer")
    return (
        int(known.get("iteration") or 0),
        Row(operation, experts_as_one(module), tensor),
        layer if isinstance(layer, int) else -1,
    )


def _first_of_each(entries: Sequence[CapturedTensor]) -> tuple[list[CapturedTensor], int]:
    """The first micro-batch of each tensor of a layer, and the number of the others."""
    first: dict[tuple[Any, ...], CapturedTensor] = {}
    repeated = 0
    for entry in sorted(entries, key=_first_micro_batch):
        known = entry.metadata
        if isinstance(known.get("layer"), int):
            key = (_place(entry), known.get("module"))
            repeated += key in first
            first.setdefault(key, entry)
    return list(first.values()), repeated


def _first_micro_batch(entry: CapturedTensor) -> tuple[int, int]:
    return int(entry.metadata.get("rank") or 0), int(entry.metadata.get("micro_batch") or 0)


def _choose(numerics: Numerics, places: Sequence[_Place], lines: Lines, max_cells: int) -> None:
    """Evenly spaced rows, layers and iterations within the limit, with a note on the omitted ones."""
    iterations = tuple(sorted({place[0] for place in places}))
    layers = tuple(sorted({place[2] for place in places}))
    rows = _in_order({place[1]: None for place in places})
    numerics.rows = rows[: max(1, max_cells // 2)]
    numerics.layers = [*_spread(layers, max_cells // max(1, len(numerics.rows)))]
    each = max(1, len(numerics.rows) * len(numerics.layers))
    numerics.iterations = _spread(iterations, max_cells // each)
    for shown, there, what in (
        (numerics.rows, rows, "tensors of a layer"),
        (numerics.layers, layers, "layers"),
        (numerics.iterations, lines.iterations, "iterations"),
    ):
        if len(shown) < len(there):
            numerics.notes.append(
                f"{len(shown)} of {len(there)} {what} are shown, to keep the page small"
            )


def _spread(numbers: tuple[int, ...], count: int) -> list[int]:
    return milestones(numbers, count) if count > 1 else list(numbers[:1])


_ORDER = {FORWARD: 0, BACKWARD: 1}


def _in_order(rows: Mapping[Row, None]) -> list[Row]:
    """The order of tensors: forward before backward, modules in the forward order, tensors as captured."""
    flow = {module: i for i, module in enumerate(in_flow(row.module for row in rows))}
    return sorted(rows, key=lambda row: (_ORDER.get(row.operation, 2), flow[row.module]))


def _in_order_of_products(rows: set[Row]) -> list[Row]:
    """The order of slots: forward before backward, modules in the forward order, slots as in schemes."""
    flow = {module: i for i, module in enumerate(in_flow(row.module for row in rows))}

    def key(row: Row) -> tuple[Any, ...]:
        place = place_of_slot(row.name)
        return _ORDER.get(row.operation, 2), flow[row.module], place, row.name

    return sorted(rows, key=key)


@dataclass
class Lines:
    """The shown part of a capture."""

    entries: list[CapturedTensor] = field(default_factory=list)
    #: The shown iterations, and all iterations; ascending.
    shown: list[int] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    #: Whether the deadline passed before the end of the manifest.
    is_cut: bool = False
    #: What is wrong with lines that were read, which are left out.
    damage: list[str] = field(default_factory=list)


def lines_with_room(folder: Path, max_lines: int, deadline: Deadline) -> Lines:
    """The lines of evenly spaced iterations within the limit; of at least one iteration.

    Raises:
        CaptureError: nothing was captured.
    """
    listed, described = (
        IterationIndex(folder, name, lambda: deadline.passed) for name in (MANIFEST, STATISTICS)
    )
    if not (listed.places or described.places):
        capture = open_capture(folder)
        entries = list(capture)
        iterations = sorted({int(entry.metadata.get("iteration") or 0) for entry in entries})
        return Lines(entries, iterations, iterations, damage=list(capture.damage))
    numbers = tuple(sorted({*listed.places, *described.places}))
    largest = max(len(places) for index in (listed, described) for places in index.places.values())
    count = max(1, max_lines // largest)
    shown = milestones(numbers, count) if count > 1 else [numbers[0]]
    of_values, of_statistics = listed.read(shown), described.read(shown)
    lines = [*of_values, *unlisted(of_statistics, of_values)]
    damage = [str(error) for error in (*listed.damage, *described.damage)]
    entries = together((CapturedTensor.of(folder, line) for line in lines), damage)
    return Lines(entries, shown, list(numbers), listed.is_cut or described.is_cut, damage)
