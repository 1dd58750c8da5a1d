"""What the pictures of a run show of its captured tensors: magnitudes, and the error of each operand under its format.

Magnitudes are those that the capture counted, of whole tensors. Operands are judged by a bounded part of the captured
values, in the formats that the run declared; where it declared none, in the one of the file's name, or `ASSUMED`. Of a
tensor without values there is what the capture judged while it passed (`capture.format`), and nothing where no format
was chosen.

Numbers that the table of measures has are taken from it; the others are measured and added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quantexp.analysis.compare.gap import milestones
from quantexp.analysis.measures.measured import (
    USUAL_FORMATS,
    Measured,
    Request,
    is_quantised,
    measure,
    of_statistics,
)
from quantexp.analysis.measures.operand import largest_scale_exponent
from quantexp.analysis.measures.row import TensorRow
from quantexp.analysis.measures.table import MeasuresTable, key_of
from quantexp.analysis.tensors.operands import declared_operands
from quantexp.analysis.tensors.place import Kind, Place, kind_of
from quantexp.capture.lines import torn_lines
from quantexp.capture.reader import Capture, CapturedTensor, open_capture
from quantexp.errors import CaptureError

#: The assumed format of operands whose format neither the metadata nor the file name gives.
ASSUMED = "mxfp8"
#: Maximum tensors; with more, evenly spaced iterations are read.
MOST_TENSORS = 20_000
_NONFINITE = " NaN or Inf"


@dataclass(frozen=True)
class Look:
    """The results for one tensor."""

    measured: Measured
    kind: Kind
    #: Format of a slot -> scale exponent for the tensor's largest element.
    scales: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FirstLook:
    """The results for the tensors of one capture."""

    tensors: tuple[Look, ...] = ()
    #: Anomaly ("all zero", "missing") -> labels of its tensors.
    findings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: The iterations of the tensors, if they are not all that were captured.
    iterations: tuple[int, ...] | None = None

    def of_last_iteration(self) -> FirstLook:
        """The part of the last iteration that was captured in as many passes as any other; whole if there is one."""
        passes: dict[int, set[str]] = {}
        for look in self.tensors:
            place = look.measured.place
            passes.setdefault(place.iteration, set()).add(place.operation)
        if len(passes) <= 1:
            return self
        most = max(map(len, passes.values()))
        last = max(iteration for iteration, seen in passes.items() if len(seen) == most)
        shown = tuple(k for k in self.tensors if k.measured.place.iteration == last)
        return replace(self, tensors=shown, iterations=(last,))

    @property
    def has_values(self) -> bool:
        """Whether any tensor has captured values."""
        return any(look.measured.from_values for look in self.tensors)

    @property
    def is_judged(self) -> bool:
        """Whether any operand has a quantisation error."""
        return any(look.measured.operands for look in self.tensors)

    @property
    def is_assumed(self) -> bool:
        """Whether operands were judged although no format was declared."""
        operands = [operand for look in self.tensors for operand in look.measured.operands]
        return bool(operands) and all(o.slot and not o.declared for o in operands)


def captured_in(folder: Path) -> Capture:
    """The tensors of a capture folder, including those with statistics only; empty without captures."""
    try:
        return open_capture(folder, statistics=True)
    except CaptureError:
        return Capture(folder, [])


def first_look(capture: Capture, table: MeasuresTable | None = None, prefix: str = "") -> FirstLook:
    """What is shown of a capture, whose tensors have the names with the prefix in the table.

    A tensor that cannot be read or judged is a finding. Tensors are measured side by side, each on one core: torch's
    own threads would wait for each other at every one of many short operations.
    """
    entries, iterations = _with_room(capture)
    is_declared = any(map(is_quantised, entries))
    requests = [_request(entry, is_declared=is_declared) for entry in entries]
    measures = [_known(*each, table, prefix) for each in zip(entries, requests, strict=True)]
    missing = [place for place, measured in enumerate(measures) if measured is None]
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        new = pool.map(_measured, [entries[i] for i in missing], [requests[i] for i in missing])
        for place, outcome in zip(missing, new, strict=True):
            measures[place], entry = outcome, entries[place]
            if table is not None and isinstance(outcome, Measured):
                row = TensorRow(None, outcome, requests[place])
                table.add(prefix + entry.name, key_of(entry), row)
    torch.set_num_threads(num_threads)
    findings: dict[str, list[str]] = {}
    if torn := list(torn_lines(capture.folder)):
        findings["lines that a crash tore, left out"] = torn
    looks = []
    for entry, measured in zip(entries, measures, strict=True):
        if not isinstance(measured, Measured):
            findings.setdefault(str(measured), []).append(_name(entry))
            continue
        for what in _findings(measured):
            findings.setdefault(what, []).append(measured.place.label)
        kind = kind_of(str(entry.metadata.get("tensor")))
        looks.append(Look(measured, kind, _scales(entry.metadata, measured.abs_max)))
    return FirstLook(tuple(looks), findings, iterations)


def _with_room(capture: Capture) -> tuple[list[CapturedTensor], tuple[int, ...] | None]:
    """Every stored value once, then tensors with statistics only, limited to evenly spaced iterations."""
    entries = [*capture.with_values(), *capture.described()]
    if len(entries) <= MOST_TENSORS:
        return entries, None
    of = [int(entry.metadata.get("iteration") or 0) for entry in entries]
    all_of_them = tuple(sorted(set(of)))
    each = -(-len(entries) // len(all_of_them))
    chosen = set(milestones(all_of_them, max(2, MOST_TENSORS // each)))
    kept = [entry for entry, iteration in zip(entries, of, strict=True) if iteration in chosen]
    return kept, tuple(sorted(chosen))


def _request(entry: CapturedTensor, *, is_declared: bool) -> Request:
    """What the pictures show of a tensor."""
    named = entry.metadata.get("quant_type")
    assumed = named if named in USUAL_FORMATS else ASSUMED
    return Request(() if is_declared else (assumed,), operands_only=True)


def _known(
    entry: CapturedTensor, request: Request, table: MeasuresTable | None, prefix: str
) -> Measured | str | None:
    """The measures in the table or in the capture's statistics, or why there are none; None if nobody has measured."""
    if not entry.metadata.get("file"):
        try:
            return of_statistics(entry.metadata)
        except CaptureError:
            return "statistics that cannot be read"
    if table is None:
        return None
    try:
        return table.measured(entry, request, prefix)
    except CaptureError:
        return _why_unreadable(entry)
    except OSError:
        return "missing"


def _measured(entry: CapturedTensor, request: Request) -> Measured | str:
    """The measures of a tensor, or why there are none."""
    try:
        return measure(entry, request)
    except CaptureError:
        return _why_unreadable(entry)
    except OSError:
        return "missing"


def _why_unreadable(entry: CapturedTensor) -> str:
    """Whether the file is corrupt, missing, or named by the manifest at a place that is not read; or lacks parts."""
    try:
        entry.require_complete()
    except CaptureError:
        return "incomplete"
    try:
        path = entry.path
    except CaptureError:
        return "not a file of the capture folder"
    try:
        return "corrupt" if path.is_file() else "missing"
    except OSError:  # a name longer than any file's
        return "missing"


def _findings(measured: Measured) -> Iterator[str]:
    if measured.place.is_scale:
        return
    for note in measured.notes:
        yield "NaN or Inf among the elements" if note.endswith(_NONFINITE) else note
    if any(one.fidelity.sqnr_db == -math.inf for one in measured.operands):
        yield "a value became infinite"


def _scales(metadata: Mapping[str, Any], abs_max: float) -> dict[str, int]:
    if not (math.isfinite(abs_max) and abs_max > 0):
        return {}
    try:
        declared = declared_operands(metadata)
    except CaptureError:
        return {}
    return {one.name: largest_scale_exponent(one, abs_max) for one in declared}


def _name(entry: CapturedTensor) -> str:
    """The file's name, or the label of a tensor with statistics only."""
    file = entry.metadata.get("key") or entry.metadata.get("file")
    return Path(str(file)).name if file else Place.of(entry.metadata).label
