"""One look at each captured tensor: magnitudes by kind, SQNR by operand, what is odd.

Each tensor is opened once and at most 2^19 of its elements are looked at, so that the time does
not grow with the size of the tensors. HiF8's amax is that of the whole tensor all the same, as
captured, which is this rank's shard of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantexp.analysis.collection import Collection, Record, load_tensor
from quantexp.analysis.inventory import Kind, kind_of, module_of
from quantexp.analysis.magnitude import MagnitudeHistogram, magnitude_histogram
from quantexp.analysis.operands import DeclaredOperand, declared_operands
from quantexp.analysis.rounded import is_scaled, rounded_part
from quantexp.analysis.sample import sample_blocks
from quantexp.analysis.statistics import Fidelity, quantisation_error
from quantexp.errors import CaptureError
from quantexp.formats import finite_amax

_MX_BLOCK = 32


@dataclass(frozen=True)
class OperandFidelity:
    """One operand of one module in one layer, under its declared format."""

    module: str
    layer: int
    declared: DeclaredOperand
    fidelity: Fidelity


@dataclass
class Survey:
    """What the tensors of one run, or one of them, say."""

    magnitudes: dict[Kind, MagnitudeHistogram] = field(default_factory=dict)
    operands: list[OperandFidelity] = field(default_factory=list)
    #: Finding ("all zero") -> the tensors, by their labels.
    findings: dict[str, list[str]] = field(default_factory=dict)

    def note(self, finding: str, name: str) -> None:
        """Name a tensor under a finding."""
        self.findings.setdefault(finding, []).append(name)

    def add(self, other: Survey) -> None:
        """Take in what another tensor says."""
        for kind, histogram in other.magnitudes.items():
            self.magnitudes[kind] = self.magnitudes.get(kind, MagnitudeHistogram()) + histogram
        self.operands += other.operands
        for finding, names in other.findings.items():
            self.findings.setdefault(finding, []).extend(names)


def survey_tensors(tensors_dir: Path, collection: Collection) -> Survey:
    """Look at every file of a collection; what cannot be judged is a finding, the rest goes on.

    Tensors are looked at side by side, each on one core: torch's own threads would wait for each
    other at every one of many short operations.
    """
    groups = _by_file(collection)
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        looks = list(pool.map(partial(survey_file, tensors_dir), groups))
    torch.set_num_threads(num_threads)
    survey = Survey()
    for look in looks:
        survey.add(look)
    return survey


def survey_file(tensors_dir: Path, records: Sequence[Record]) -> Survey:
    """Look at one file, which all of the records share."""
    survey = Survey()
    first = records[0]
    try:
        tensor = load_tensor(tensors_dir, first)
    except CaptureError:
        is_there = (tensors_dir / str(first.file)).is_file()
        survey.note("corrupt" if is_there else "missing", Path(str(first.stored)).name)
        return survey
    if tensor.numel() == 0:
        survey.note("empty", first.label)
        return survey
    if kind_of(first) is Kind.SCALE:
        return survey  # codes, not numbers
    rows, _ = sample_blocks(tensor, -1, _MX_BLOCK)
    histogram = magnitude_histogram(rows)
    survey.magnitudes[kind_of(first)] = histogram
    _note_what_is_odd(rows, histogram, first.label, survey)
    if histogram.finite > histogram.zeros:
        _judge_operands(tensor, records, survey)
    return survey


def _by_file(collection: Collection) -> list[list[Record]]:
    by_file: dict[str, list[Record]] = {}
    for record in collection.records:
        if record.stored is not None:
            by_file.setdefault(record.stored, []).append(record)
    return list(by_file.values())


def _note_what_is_odd(
    rows: Tensor, histogram: MagnitudeHistogram, label: str, survey: Survey
) -> None:
    if histogram.nonfinite:
        whole = histogram.finite == 0
        survey.note("nothing finite" if whole else "NaN or Inf among the elements", label)
    elif histogram.zeros == rows.numel():
        survey.note("all zero", label)
    elif rows.numel() > 1 and bool((rows == rows.reshape(-1)[0]).all()):
        survey.note("constant", label)


def _judge_operands(tensor: Tensor, records: Sequence[Record], survey: Survey) -> None:
    first = records[0]
    try:
        slots = _distinct_slots(records)
    except CaptureError:
        survey.note("declaration not understood", first.label)
        return
    amax = finite_amax(tensor) if any(is_scaled(slot) for slot in slots) else None
    for slot in slots:
        fidelity = _fidelity(tensor, slot, amax)
        survey.operands.append(OperandFidelity(module_of(first), first.layer, slot, fidelity))
        if not math.isfinite(fidelity.sqnr_db):
            survey.note(_UNPLOTTABLE[str(fidelity.sqnr_db)], f"{first.label} as {slot.slot}")


#: Why an SQNR has no place on an axis.
_UNPLOTTABLE = {
    "nan": "SQNR undefined",
    "inf": "SQNR infinite, nothing was rounded",
    "-inf": "SQNR -inf, a value became infinite",
}


def _distinct_slots(records: Sequence[Record]) -> list[DeclaredOperand]:
    """Each slot once, although every record of a file may list it."""
    slots: dict[str, DeclaredOperand] = {}
    for record in records:
        for declared in declared_operands(record):
            slots.setdefault(declared.slot, declared)
    return list(slots.values())


def _fidelity(tensor: Tensor, declared: DeclaredOperand, amax: Tensor | None) -> Fidelity:
    part = rounded_part(tensor, declared, amax)
    return quantisation_error(part.x, declared.format, part.dim, part.options, part.padding)
