"""Processes all files of a capture in parallel: opens each once, scores its blocks, and releases it.

Files are memory-mapped and results come in the order of the files, so that neither the size of a collection nor the
number of threads changes anything but the time. A file that is missing, damaged, no file of captured values, or laid
out in another way than its operand is named; the rest goes on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import lcm

import torch
from torch import Tensor

from quantexp.analysis.tensors.operands import check_layout, laid_out, rows_of, slots_of_tensor
from quantexp.analysis.tensors.sample import OperandSample, keeps_blocks, spread_blocks
from quantexp.capture.reader import Capture, CapturedTensor
from quantexp.capture.statistics.errors import Fidelity
from quantexp.errors import CaptureError
from quantexp.extras.requantise.candidates import Candidate
from quantexp.extras.requantise.exponent import Point, study
from quantexp.extras.requantise.scoring import scores
from quantexp.formats import finite_amax
from quantexp.formats.layout import INPUT_DTYPES
from quantexp.quant.sites import Operand, Slot

#: The largest block of all formats and transforms of the table.
_BLOCK = 32


@dataclass(frozen=True)
class Work:
    """The work on every file."""

    candidates: Sequence[Candidate]
    points: Sequence[Point]
    #: The number of sampled elements of each operand; 0 means all.
    num_elements: int

    @property
    def block(self) -> int:
        """The least number of elements that holds whole blocks of every candidate."""
        blocks = [candidate.format.block or 1 for candidate in self.candidates]
        transforms = [candidate.hadamard_block or 1 for candidate in self.candidates]
        return lcm(_BLOCK, *blocks, *transforms)

    @property
    def has_rows(self) -> bool:
        """Whether a candidate has blocks of several rows."""
        return any(candidate.format.across > 1 for candidate in self.candidates)

    def num_sampled(self, slot: Slot) -> int:
        """The number of sampled elements of a slot's operand: all of a weight, where blocks have several rows."""
        return 0 if self.has_rows and slot.operand is Operand.W else self.num_elements


@dataclass(frozen=True)
class SlotScores:
    """The scores of one operand: the fidelity of each candidate, and at each point of the study."""

    slot: Slot
    #: The number of sampled elements.
    num_elements: int
    fidelities: list[Fidelity]
    study: list[Fidelity]


@dataclass
class FileScores:
    """The result of one file."""

    entry: CapturedTensor
    slots: list[SlotScores] = field(default_factory=list)
    #: Why the file could not be read; None if it could.
    problem: str | None = None
    #: The omitted parts, with reasons.
    notes: list[str] = field(default_factory=list)


def operands_of(capture: Capture) -> Capture:
    """The tensors with values that are operands of a product, without repeated files."""
    chosen = [entry for entry in capture.with_values() if slots_of_tensor(entry.metadata)]
    return Capture(capture.folder, chosen)


def score_file(entry: CapturedTensor, work: Work) -> FileScores:
    """Score all slots of one tensor under all candidates."""
    file_scores = FileScores(entry)
    try:
        x = _values(entry)
        if x.numel() == 0:
            file_scores.notes.append(f"{entry.label} is empty")
            return file_scores
        for slot in slots_of_tensor(entry.metadata):
            check_layout(tuple(x.shape), slot)
            _score_slot(file_scores, x, slot, work)
    except CaptureError as error:
        file_scores.problem, file_scores.slots = str(error), []
    return file_scores


def passed(files: Capture, work: Work, jobs: int) -> Generator[FileScores]:
    """The scores of every file in order, `jobs` files in parallel, each on one core.

    torch's own threads would wait for each other at every one of many short operations. Closed early, it waits for what
    has begun and drops the rest.
    """
    num_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(lambda entry: score_file(entry, work), files)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(num_threads)


def _values(entry: CapturedTensor) -> Tensor:
    x = entry.verified()
    if not x.is_floating_point():
        raise CaptureError(f"{entry.path} holds no floating-point numbers, got {x.dtype}")
    return x


def _score_slot(file_scores: FileScores, x: Tensor, slot: Slot, work: Work) -> None:
    metadata, block = file_scores.entry.metadata, work.block
    num_elements = work.num_sampled(slot)
    if not keeps_blocks(metadata, slot.dim, block):
        file_scores.notes.append(
            f"{file_scores.entry.label} as {slot}: the capture is a sample in which "
            f"blocks along {slot.axis} are not whole"
        )
        return
    amax = _amax(x, metadata.get("sample"), metadata.get("statistics"))
    padding, rows = None, rows_of(metadata, slot.dim)
    if rows is not None:
        laid = laid_out(x, rows)
        x = laid.x
        padding, _ = spread_blocks(laid.padding, 0, block, num_elements)
    blocks, dim = spread_blocks(x, slot.dim, block, num_elements)
    usable = blocks if blocks.dtype in INPUT_DTYPES else blocks.float()
    sample = OperandSample(usable, dim, amax, padding)
    file_scores.slots.append(
        SlotScores(
            slot,
            sample.num_elements,
            list(scores(sample, slot, work.candidates)),
            list(study(sample, list(work.points))),
        )
    )


def _amax(x: Tensor, sample: object, statistics: object) -> Tensor:
    """The amax of the whole tensor, which a sampled capture has in its statistics."""
    if sample and isinstance(statistics, dict) and statistics.get("abs_max") is not None:
        return torch.tensor(float(statistics["abs_max"]))
    return finite_amax(x if x.dtype in INPUT_DTYPES else x.float())
