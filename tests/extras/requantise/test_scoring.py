from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from quantexp.analysis.tensors.operands import slots_of_tensor
from quantexp.analysis.tensors.sample import OperandSample
from quantexp.capture.statistics.errors import Fidelity, quantisation_error
from quantexp.extras.requantise.candidates import Candidate, candidates, formats_of
from quantexp.extras.requantise.scoring import scores
from quantexp.formats import (
    Hadamard,
    Rounding,
    ScaleRule,
    Scaling,
    finite_amax,
    get_format,
    hadamard,
    random_signs,
)
from quantexp.quant.sites import Slot
from quantexp.quant.step_state import Draw

from .conftest import normal

X_SLOT, _ = slots_of_tensor({"layer_type": "linear", "tensor": "input"})
_, G_TOKENS = slots_of_tensor({"layer_type": "linear", "tensor": "grad_output"})
MXFP4 = get_format("mxfp4")


def score(x: torch.Tensor, candidate: Candidate, dim: int = -1) -> Fidelity:
    (fidelity,) = scores(OperandSample(x, dim, finite_amax(x)), X_SLOT, [candidate])
    return fidelity


@pytest.mark.parametrize(
    ("rounding", "noise"), [(Rounding.EVEN, 1 / 12), (Rounding.STOCHASTIC, 1 / 6)]
)
def test_uniform_values_under_a_uniform_grid_have_the_closed_form(
    rounding: Rounding, noise: float
) -> None:
    """From 8 to 16 e4m3 has the step 1: a noise of 1/12 to nearest, of the mean of f (1 - f), 1/6, at random."""
    x = torch.rand(256, 512, generator=torch.Generator().manual_seed(1)) * 8 + 8
    measured = score(x, Candidate(get_format("fp8_e4m3"), None, Scaling.NONE, rounding))
    signal = (16**3 - 8**3) / (3 * 8)
    # 0.03 dB: 131072 squared errors, each of a deviation as large as its mean, scatter by 0.3 %, 0.012 dB.
    assert abs(measured.sqnr_db - 10 * math.log10(signal / noise)) < 0.03
    assert (measured.underflow_share, measured.saturated_share) == (0, 0)


@pytest.mark.parametrize(
    ("values", "noise", "underflow", "saturated"),
    [
        # scale 1; 5.5 ties to 6 (even), 0.2 to 0
        ((6.0, 5.5, 0.2, 1.0), 0.5**2 + 0.2**2, 1 / 4, 0),
        # amax 7 has the exponent of 4, so the scale is 1 as well: 7 becomes 6
        ((7.0, -6.5, 3.0, 0.5), 1.0 + 0.5**2, 0, 2 / 32),
    ],
)
def test_a_block_has_the_score_computed_by_hand(
    values: tuple[float, ...], noise: float, underflow: float, saturated: float
) -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor(values)
    measured = score(x, Candidate(MXFP4, ScaleRule.FLOOR, None, Rounding.EVEN))
    expected = 10 * math.log10(sum(v * v for v in values) / noise)
    # 1e-5: 0.2 is no float32.
    assert math.isclose(measured.sqnr_db, expected, abs_tol=1e-5)
    assert (measured.underflow_share, measured.saturated_share) == (underflow, saturated)


def test_a_transform_is_that_of_the_textbook() -> None:
    """Against Sylvester's matrix by numpy's kron and the casts of ml_dtypes: floor scales, blocks of 32."""
    matrix = np.array([[1.0]])
    for _ in range(5):
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    x = normal(64, 32, seed=5)
    v = x.double().numpy() @ matrix
    s = np.frexp(np.abs(v).max(-1, keepdims=True))[1] - 1 - 2
    q = np.clip(v / 2.0**s, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    error = q.astype(np.float64) * 2.0**s - v
    expected = 10 * math.log10((v**2).sum() / (error**2).sum())
    candidate = Candidate(
        MXFP4, ScaleRule.FLOOR, None, Rounding.EVEN, hadamard=Hadamard.DETERMINISTIC
    )
    # 1e-3 dB: the transform is float32, which moves single elements across a tie.
    assert math.isclose(score(x, candidate).sqnr_db, expected, abs_tol=1e-3)


def by_itself(x: torch.Tensor, dim: int, slot: Slot, one: Candidate) -> Fidelity:
    """A candidate's fidelity by the public functions alone, without shared work."""
    v = x
    if one.hadamard_block is not None:
        random = one.hadamard is Hadamard.RANDOM
        signs = random_signs(one.hadamard_block, 0, 0, x.device) if random else None
        v = hadamard(x, axis=dim, block=one.hadamard_block, signs=signs, left=slot.is_left)
    draw = Draw(seed=0) if one.rounding is Rounding.STOCHASTIC else None
    return quantisation_error(v, one.spec(slot), dim, draw=draw)


@pytest.mark.parametrize("fmt", formats_of(None), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("slot", "dim"), [(X_SLOT, -1), (G_TOKENS, 0)])
def test_shared_work_changes_no_score(fmt: object, slot: Slot, dim: int) -> None:
    """In float32, so that no second rounding to bf16 follows; with zeros and with a short last block."""
    x = normal(40, 2, 48, seed=3).float()
    x[0, 0, 5:9] = 0
    every = candidates([fmt])  # type: ignore[list-item]
    fidelities = list(scores(OperandSample(x, dim, finite_amax(x)), slot, every))
    assert len(fidelities) == len(every)
    for one, fidelity in zip(every, fidelities, strict=True):
        assert fidelity == by_itself(x, dim, slot, one), one.name


def test_values_are_rounded_to_the_tensor_s_dtype() -> None:
    """As in training, where bf16 does not hold fp8 values under an exact scale."""
    x = normal(32, 64)
    candidate = Candidate(get_format("fp8_e4m3"), None, Scaling.EXACT, Rounding.EVEN)
    assert score(x, candidate) == quantisation_error(x, "fp8_e4m3")
    assert score(x, candidate) != score(x.float(), candidate)


def test_the_scale_of_a_tensor_is_that_of_the_whole_tensor() -> None:
    """The whole tensor has 2^20 times the amax of the sample, so e4m3 rounds the sample to zero."""
    x = normal(32, 64)
    candidate = Candidate(get_format("fp8_e4m3"), None, Scaling.CURRENT, Rounding.EVEN)
    amax = finite_amax(x) * 2.0**20
    (part,) = scores(OperandSample(x, -1, amax), X_SLOT, [candidate])
    assert part.underflow_share == 1
    assert score(x, candidate).underflow_share < 0.01
