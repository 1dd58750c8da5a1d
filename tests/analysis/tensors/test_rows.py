"""Measures of an expert's blocks along tokens, against the operands that its run multiplied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard as scipy_hadamard

from quantexp.analysis.draw.grids import grids_of
from quantexp.analysis.measures.measured import Request, measure
from quantexp.analysis.quick.first_look import first_look
from quantexp.analysis.tensors.operands import laid_out, num_blocks_of_padding, padding_of_transform
from quantexp.analysis.tensors.sample import keeps_blocks
from quantexp.capture.reader import Capture, CapturedTensor, open_capture
from quantexp.errors import CaptureError
from quantexp.extras.requantise.candidates import candidates, formats_of
from quantexp.extras.requantise.exponent import study_points
from quantexp.extras.requantise.passing import Work, score_file
from quantexp.formats import get_format
from quantexp.runs.paths import RunDir

RunTiny = Callable[..., RunDir]
Array = np.ndarray[Any, Any]
BLOCK = 32


@pytest.fixture
def captured(run_tiny: RunTiny, tiny_models: dict[str, list[str]]) -> Callable[[str], Path]:
    """The tensors of a run of experts, before and after quantisation."""

    def run(scheme: str) -> Path:
        words = [f"quant={scheme}", "capture.values=both", "capture.stop_after_capture=true"]
        return run_tiny(*tiny_models["deepseek2_lite"], *words).tensors

    return run


def pairs(folder: Path) -> Iterator[tuple[CapturedTensor, Array, Array]]:
    """Each operand of an expert's product over tokens: its entry, its rows, and the values multiplied, by sequence.

    The rows are laid out by numpy: [sequence][row of it, width].
    """
    entries = {(e.metadata["module"], e.metadata["tensor"]): e for e in open_capture(folder)}
    for (module, tensor), entry in entries.items():
        if module.startswith("expert") and tensor in ("input", "grad_output"):
            q = entries[module, f"{tensor}_wgrad"].torch().double().numpy()
            x = entry.torch().double().numpy()
            sequence = np.array(entry.metadata["row_sequences"])
            laid = np.zeros_like(q)
            for b in range(q.shape[1]):
                own = x[sequence == b]
                laid[: len(own), b] = own
            yield entry, laid, q


def decibel(x: Array, q: Array) -> float:
    return float(10 * np.log10((x**2).sum() / ((x - q) ** 2).sum()))


def transformed(x_LBW: Array, left: bool) -> Array:
    """Scipy's transform in blocks of 32 along the first axis, a short last block in powers of two."""
    y, start = np.zeros_like(x_LBW), 0
    while start < len(x_LBW):
        size = min(BLOCK, 1 << (len(x_LBW) - start).bit_length() - 1)
        k = size.bit_length() - 1
        factor = 2.0 ** -((k + 1) // 2 if left else k // 2)
        matrix = scipy_hadamard(size) * factor
        y[start : start + size] = np.einsum("ij,jbw->ibw", matrix, x_LBW[start : start + size])
        start += size
    return y


def check_median_block(entry: CapturedTensor, x: Array) -> None:
    """The grid of the median block is that of the layout's blocks without those of zeros."""
    amax = [np.abs(x[start : start + BLOCK]).max(0).ravel() for start in range(0, len(x), BLOCK)]
    some = np.concatenate(amax)
    exponents = np.sort(np.floor(np.log2(some[some > 0])) - 2)
    middle = exponents[(len(exponents) - 1) // 2]
    grids = grids_of(entry.metadata, entry.torch(), float(entry.torch().abs().max()))
    median = next(g for g in grids if "wgrad" in g.label)
    assert math.log2(max(median.magnitudes) / get_format("mxfp4").element.max) == middle


@pytest.mark.slow
def test_every_score_of_blocks_along_tokens_is_that_of_the_runs_own_operand(
    captured: Callable[[str], Path],
) -> None:
    folder = captured("linear_mxfp4")
    (mxfp4,) = formats_of(["mxfp4"])
    work = Work(candidates([mxfp4]), study_points([mxfp4]), 0)
    several = [pair for pair in pairs(folder) if pair[2].shape[1] > 1]
    assert len(several) >= 4
    apart = 0
    for entry, x, q in several:
        expected = decibel(x, q)
        judged = {o.slot: o for o in measure(entry, Request()).operands if o.slot}
        operand = next(o for slot, o in judged.items() if slot.startswith("wgrad"))
        # 1e-6 dB: float64 sums in another order.
        assert operand.fidelity.sqnr_db == pytest.approx(expected, abs=1e-6)
        num_elements = entry.torch().numel()
        assert operand.num_elements == num_elements
        assert operand.fidelity.mse == pytest.approx(((x - q) ** 2).sum() / num_elements, rel=1e-9)
        assert operand.fidelity.underflow_share == ((x != 0) & (q == 0)).sum() / (x != 0).sum()
        width = x.shape[-1]
        of_sequence = np.bincount(entry.metadata["row_sequences"])
        num_blocks = sum(-(-int(rows) // BLOCK) for rows in of_sequence) * width
        assert sum(operand.scale_exponents.counts) + operand.zero_blocks == num_blocks
        (scored,) = (s for s in score_file(entry, work).slots if s.slot.product.value == "wgrad")
        best = [
            fidelity.sqnr_db
            for candidate, fidelity in zip(work.candidates, scored.fidelities, strict=True)
            if candidate.name.startswith("mxfp4_e2m1 floor") and candidate.hadamard_block is None
        ]
        assert any(math.isclose(one, expected, abs_tol=1e-6) for one in best)
        at_zero = next(
            f
            for point, f in zip(work.points, scored.study, strict=True)
            if point.exponent == 0 and point.is_offset
        )
        assert at_zero.sqnr_db == pytest.approx(expected, abs=1e-6)
        assert scored.num_elements == num_elements
        (looked,) = first_look(Capture(folder, [entry])).tensors
        (bounded,) = (o for o in looked.measured.operands if o.slot.startswith("wgrad"))
        assert bounded.fidelity.sqnr_db == pytest.approx(expected, abs=1e-6)
        as_neighbours = CapturedTensor.of(
            entry.folder, {k: v for k, v in entry.metadata.items() if k != "row_sequences"}
        )
        plain = {o.slot: o.fidelity.sqnr_db for o in measure(as_neighbours, Request()).operands}
        apart += abs(plain[operand.slot] - expected) > 0.01
    assert apart > len(several) / 2, "blocks of neighbouring rows would give other numbers"
    check_median_block(*max(several, key=lambda pair: pair[1].size)[:2])


def test_a_transform_along_tokens_is_that_of_each_sequences_rows(
    captured: Callable[[str], Path],
) -> None:
    looked = 0
    for entry, x, q in pairs(captured("more/linear_mxfp4_hadamard")):
        operand = next(
            o
            for o in measure(entry, Request()).operands
            if o.slot.startswith("wgrad") and o.declared
        )
        expected = decibel(transformed(x, entry.metadata["tensor"] == "grad_output"), q)
        # Sums of the transform are rounded to float32 in another order: 2^-24 against errors of 2^-3.
        assert operand.fidelity.sqnr_db == pytest.approx(expected, abs=0.02)
        looked += 1
    assert looked >= 4


def test_a_wrong_number_of_row_sequences_is_refused() -> None:
    words = r"row_sequences must have the sequence of each row, got 3 for the shape \[4, 8\]"
    with pytest.raises(CaptureError, match=words):
        laid_out(torch.ones(4, 8), [0, 0, 1])


def test_no_rows_are_no_blocks() -> None:
    laid = laid_out(torch.ones(0, 8), [])
    assert laid.x.numel() == laid.padding.numel() == 0


def test_padding_beside_rows_is_part_of_their_transform() -> None:
    padding = torch.tensor([False] * 5 + [True] * 6)[:, None].expand(11, 3)
    moved = padding_of_transform(padding, 0, 4)
    assert moved[:, 0].tolist() == [False] * 8 + [True] * 3
    assert num_blocks_of_padding(padding, 0, 4) == 3


def test_a_sample_of_an_experts_rows_keeps_no_blocks_along_tokens() -> None:
    sample = {"axis": 0, "shape": [64, 8], "indices": list(range(32)), "of": "blocks"}
    assert keeps_blocks({"sample": sample}, 0, 32)
    assert not keeps_blocks({"sample": sample, "row_sequences": [0] * 64}, 0, 32)
