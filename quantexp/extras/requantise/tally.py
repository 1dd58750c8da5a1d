"""The worst tensor of every module, slot and candidate, over layers, iterations, micro-batches and ranks.

Memory does not grow with the collection but for the study, of which three numbers are kept for each tensor and point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quantexp.analysis.tensors.operands import module_of
from quantexp.capture.statistics.errors import Fidelity
from quantexp.extras.requantise.candidates import Candidate
from quantexp.extras.requantise.passing import FileScores, SlotScores, Work
from quantexp.formats import Format
from quantexp.quant.sites import Slot


class Place(NamedTuple):
    """A module and one of its slots."""

    module: str
    slot: Slot


@dataclass
class Worst:
    """The worst value of each number, which may come from different tensors."""

    #: In dB, for the named tensor; NaN without a tensor that has a finite non-zero element.
    sqnr_db: float = math.nan
    underflow_share: float = math.nan
    saturated_share: float = math.nan
    #: The tensor with this SQNR: `L3 fc1 backward grad_output`.
    tensor: str = ""

    def add(self, fidelity: Fidelity, tensor: str) -> None:
        """Add another tensor."""
        if math.isnan(self.sqnr_db) or fidelity.sqnr_db < self.sqnr_db:
            self.sqnr_db, self.tensor = fidelity.sqnr_db, tensor
        self.underflow_share = _larger(self.underflow_share, fidelity.underflow_share)
        self.saturated_share = _larger(self.saturated_share, fidelity.saturated_share)


@dataclass
class Tally:
    """The accumulated results of all files so far."""

    work: Work
    #: Place -> one `Worst` for each candidate.
    worst: dict[Place, list[Worst]] = field(default_factory=dict)
    num_tensors: dict[Place, int] = field(default_factory=dict)
    #: Operand -> for each point of the study the values of all tensors.
    study: dict[str, list[list[Fidelity]]] = field(default_factory=dict)
    #: File that could not be read -> reason.
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_files: int = 0

    def add(self, one_file: FileScores) -> None:
        """Add the result of a file."""
        self.notes += one_file.notes
        if one_file.problem is not None:
            self.problems.append((str(one_file.entry.metadata["file"]), one_file.problem))
            return
        self.num_files += 1
        for scores in one_file.slots:
            self._add_slot(module_of(one_file.entry.metadata), one_file.entry.label, scores)

    def places(self) -> Iterator[Place]:
        """Every scored place, in the order of the forward pass, then of the products."""
        return iter(self.worst)

    def _add_slot(self, module: str, label: str, scores: SlotScores) -> None:
        place = Place(module, scores.slot)
        worst = self.worst.setdefault(place, [Worst() for _ in self.work.candidates])
        self.num_tensors[place] = self.num_tensors.get(place, 0) + 1
        for one, fidelity in zip(worst, scores.fidelities, strict=True):
            one.add(fidelity, label)
        study = self.study.setdefault(scores.slot.operand, [[] for _ in self.work.points])
        for one_point, fidelity in zip(study, scores.study, strict=True):
            one_point.append(fidelity)


def _larger(a: float, b: float) -> float:
    return b if math.isnan(a) or b > a else a


#: Smaller differences do not count, because the sampled blocks and random numbers cause as much.
NO_DIFFERENCE_DB = 0.1


def best_of(indices: Iterable[int], worst: Sequence[Worst]) -> int | None:
    """The first candidate whose worst SQNR is within 0.1 dB of the highest; None without candidates.

    An SQNR that is not a number (tensors of zeros) is below every other.
    """
    known = {i: -math.inf if math.isnan(worst[i].sqnr_db) else worst[i].sqnr_db for i in indices}
    if not known:
        return None
    enough = max(known.values()) - NO_DIFFERENCE_DB
    return next(i for i, sqnr_db in known.items() if sqnr_db >= enough)


def best_of_formats(
    candidates: Sequence[Candidate], worst: Sequence[Worst]
) -> dict[Format, tuple[Candidate, Worst]]:
    """The best candidate of each format."""
    by_format: dict[Format, list[int]] = {}
    for index, candidate in enumerate(candidates):
        by_format.setdefault(candidate.format, []).append(index)
    best = {fmt: best_of(indices, worst) for fmt, indices in by_format.items()}
    return {fmt: (candidates[i], worst[i]) for fmt, i in best.items() if i is not None}
