"""A bounded look at a captured tensor's values, where its statistics do not say enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from quantexp.analysis.collection import Record
from quantexp.analysis.inventory import Kind, kind_of
from quantexp.analysis.sample import sample_blocks
from quantexp.analysis.survey import survey_file
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics import statistics
from quantexp.errors import CaptureError

_BLOCK = 32


def statistics_of(entry: CapturedTensor) -> tuple[int, Mapping[str, Any]]:
    """How many elements were looked at, and their statistics; none where the file cannot be read."""
    try:
        values = entry.torch()
    except CaptureError:
        return 0, {}
    if values.numel() == 0:
        return 0, {}
    part, _ = sample_blocks(values, -1, _BLOCK) if values.ndim else (values, 0)
    return part.numel(), statistics(part)


def operands_of(entry: CapturedTensor) -> list[list[Any]]:
    """Slot and format, SQNR, underflow, saturation of each quantised slot that the tensor fills."""
    record = _record(entry.metadata)
    if record is None or record.file is None or kind_of(record) is Kind.SCALE:
        return []
    survey = survey_file(entry.folder, [record])
    found: list[list[Any]] = []
    for operand in survey.operands:
        name = f"{operand.declared.slot} {operand.declared.format.name}"
        fidelity = operand.fidelity
        numbers = (fidelity.sqnr_db, fidelity.underflow_share, fidelity.saturated_share)
        found.append([name, *map(_number, numbers)])
    return found


def _record(metadata: Mapping[str, Any]) -> Record | None:
    """The manifest's line as the survey takes it; None for older collections, which declare no formats."""
    names = [field.name for field in fields(Record)]
    known = {name: metadata[name] for name in names if name in metadata}
    required = {field.name for field in fields(Record) if field.default is MISSING}
    if not required <= known.keys() or not isinstance(known.get("formats"), dict):
        return None
    return Record(**{**known, "shape": tuple(known["shape"])})


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
