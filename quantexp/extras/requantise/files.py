"""Writes the results: every score as a row, the outcome as JSON, the study as a table of medians.

requantise.csv      a row for each tensor, slot and candidate, as the files come
requantise.json     the outcome: slots, formats, recommendation, what could not be read
scale_exponent.csv  a row for each operand, format and exponent
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from quantexp.analysis.tensors.operands import module_of
from quantexp.capture.statistics.errors import Fidelity
from quantexp.extras.requantise.candidates import Candidate
from quantexp.extras.requantise.passing import FileScores
from quantexp.extras.requantise.recommend import Choice, in_order
from quantexp.extras.requantise.tally import Tally, Worst, best_of_formats
from quantexp.runs.disk import write_whole

_TENSOR = ("layer", "iteration", "micro_batch", "rank", "tensor", "file")
_OPTIONS = ("scale_rule", "scaling", "rounding", "pre_scale", "hadamard")
_SCORES = Fidelity._fields
#: The measures whose worst values are in the outcome.
_WORST = ("sqnr_db", "underflow_share", "saturated_share")
COLUMNS = (
    *("module", "site", "product", "operand", "axis", *_TENSOR),
    *("format", *_OPTIONS, "bits", "elements", *_SCORES),
)


class ScoresFile:
    """`requantise.csv`, written under a temporary name and renamed at the end; an interruption leaves no file."""

    def __init__(self, path: Path, candidates: Sequence[Candidate]) -> None:
        self._path, self._part = path, path.with_name(f".{path.name}.part")
        self._candidates = [
            (one.format.name, *(one.settings().get(o, "") for o in _OPTIONS), one.bits)
            for one in candidates
        ]

    def __enter__(self) -> ScoresFile:
        self._stream = self._part.open("w", newline="")
        self._rows = csv.writer(self._stream, lineterminator="\n")
        self._rows.writerow(COLUMNS)
        return self

    def add(self, file_scores: FileScores) -> None:
        """Write the rows of one file."""
        metadata = file_scores.entry.metadata
        tensor = [metadata.get(key) for key in _TENSOR]
        for scores in file_scores.slots:
            slot = scores.slot
            place = [
                module_of(metadata),
                slot.site.value,
                slot.product.value,
                slot.operand,
                slot.axis,
            ]
            for candidate, fidelity in zip(self._candidates, scores.fidelities, strict=True):
                self._rows.writerow([*place, *tensor, *candidate, scores.num_elements, *fidelity])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            self._part.unlink(missing_ok=True)


def outcome_json(
    tally: Tally, choices: Sequence[Choice], folder: Path, sqnr_db: float
) -> dict[str, Any]:
    """The outcome; missing values are null, and infinite values the text "inf" or "-inf"."""
    recommended = {(one.module, one.slot): one for one in choices}
    candidates = tally.work.candidates
    slots = []
    for place in in_order(choices, tally.places()):
        best = best_of_formats(candidates, tally.worst[place])
        formats = {
            fmt.name: {"options": candidate.name, "bits": candidate.bits, **_worst_json(worst)}
            for fmt, (candidate, worst) in best.items()
        }
        slots.append(
            {
                "module": place.module,
                "slot": str(place.slot),
                "axis": place.slot.axis,
                "tensors": tally.num_tensors[place],
                "formats": formats,
                "recommended": _choice_json(recommended[place.module, place.slot]),
            }
        )
    return {
        "folder": str(folder),
        "files": tally.num_files,
        "elements": tally.work.num_elements,
        "sqnr_db": sqnr_db,
        "candidates": [{"name": c.name, "bits": c.bits, **c.settings()} for c in candidates],
        "slots": slots,
        "notes": tally.notes,
        "problems": [{"file": file, "why": why} for file, why in tally.problems],
    }


def study_text(tally: Tally) -> str:
    """`scale_exponent.csv`."""
    stream = io.StringIO()
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(["operand", "format", "scale", "exponent", "tensors", *_SCORES])
    for operand, by_point in tally.study.items():
        for point, fidelities in zip(tally.work.points, by_point, strict=True):
            kind = "block offset" if point.is_offset else "amax target"
            row = [operand, point.format.name, kind, point.exponent, len(fidelities)]
            rows.writerow([*row, *medians(fidelities)])
    return stream.getvalue()


def medians(fidelities: Sequence[Fidelity]) -> Fidelity:
    """The median of each number over the tensors that have it; NaN if none has it."""
    columns = (
        [value for value in one if not math.isnan(value)] for one in zip(*fidelities, strict=True)
    )
    return Fidelity(*(median(column) if column else math.nan for column in columns))


def write_text(path: Path, text: str) -> Path:
    """Write a file atomically; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


def _worst_json(worst: Worst) -> dict[str, Any]:
    return {**{name: _number(getattr(worst, name)) for name in _WORST}, "tensor": worst.tensor}


def _choice_json(choice: Choice) -> dict[str, Any]:
    if choice.candidate is None or choice.worst is None:
        return {"format": "bf16", "bits": choice.bits, "sqnr_db": None}
    return {
        **choice.candidate.settings(),
        "bits": choice.bits,
        "sqnr_db": _number(choice.worst.sqnr_db),
    }


def _number(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return str(value) if math.isinf(value) else value
