"""The estimates of bias and variance, against their definitions and against errors whose bias is known."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest

from quantexp.extras.resolve.gradient.estimates import Tally, estimates_of

#: Batches, draws, elements.
SHAPE = (5, 3, 40)


@dataclass
class Sums:
    """What a tally reads of a batch and draw; a plain object keeps Megatron out of this test."""

    reference: float
    difference: float
    #: Does not add up.
    cosine: float = math.nan

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.reference + other.reference, self.difference + other.difference)


def sums_of(own: np.ndarray, other: np.ndarray) -> Sums:
    with np.errstate(invalid="ignore"):
        cosine = own @ other / np.linalg.norm(own) / np.linalg.norm(other)
    return Sums(float(other @ other), float((own - other) @ (own - other)), float(cosine))


def tally_of(errors: np.ndarray, reference: np.ndarray) -> Tally:
    """Of errors [batches, draws, elements] and the reference [batches, elements]."""
    means = errors.mean(1)
    pairs = [(e + r, r) for of_batch, r in zip(errors, reference, strict=True) for e in of_batch]
    total = float(np.square(means.sum(0)).sum())
    each = [sums_of(*pair) for pair in pairs]
    return Tally(each, list(np.square(means).sum(1)), total)  # type: ignore[arg-type]


def test_estimates_are_their_definitions() -> None:
    rng = np.random.default_rng(1)
    errors, reference = rng.normal(size=SHAPE), rng.normal(2.0, 1.0, (SHAPE[0], SHAPE[2]))
    result = estimates_of(tally_of(errors, reference))
    norm = np.square(reference).sum(1).mean()
    pairs = [
        a @ b
        for (k, of_k), (m, of_m) in itertools.product(enumerate(errors), repeat=2)
        for a, b in itertools.product(of_k, of_m)
        if k != m
    ]
    assert result["error2"] == pytest.approx(np.square(errors).sum(2).mean() / norm)
    assert result["bias2"] == pytest.approx(np.mean(pairs) / norm)
    assert result["draws2"] == pytest.approx(errors.var(1, ddof=1).sum(1).mean() / norm)
    angles = [
        (r + e) @ r / np.linalg.norm(r + e) / np.linalg.norm(r)
        for r, of_batch in zip(reference, errors, strict=True)
        for e in of_batch
    ]
    assert result["cosine"] == pytest.approx(np.mean(angles))


@pytest.mark.parametrize("bias", [0.0, 0.3])
@pytest.mark.parametrize("draws", [1, 3])
def test_a_known_bias_and_variance_are_met_on_average(bias: float, draws: int) -> None:
    """e = bias + batch + draw: 2,000 trials, whose mean must lie within four of its standard errors."""
    rng = np.random.default_rng(2)
    batches, elements, of_batch, of_draw = 4, 20, 0.5, 0.7
    reference = np.ones((batches, elements))
    found = []
    for _ in range(2000):
        errors = bias + of_batch * rng.normal(size=(batches, 1, elements))
        errors = errors + of_draw * rng.normal(size=(batches, draws, elements))
        result = estimates_of(tally_of(errors, reference))
        found.append([result[name] or 0.0 for name in ("error2", "bias2", "draws2")])
    expected = [bias**2 + of_batch**2 + of_draw**2, bias**2, of_draw**2 if draws > 1 else 0.0]
    error = np.std(found, axis=0) / np.sqrt(len(found))
    assert np.all(np.abs(np.mean(found, axis=0) - expected) <= 4 * error)


def test_groups_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(3)
    errors, reference = rng.normal(size=SHAPE), rng.normal(size=(SHAPE[0], SHAPE[2]))
    parts = [tally_of(errors[:, :, own], reference[:, own]) for own in (slice(15), slice(15, None))]
    whole, both = estimates_of(tally_of(errors, reference)), estimates_of(sum(parts, Tally()))
    for name in ("error2", "bias2", "draws2"):
        assert both[name] == pytest.approx(whole[name])


def test_a_gradient_that_is_zero_or_not_finite_has_no_estimate() -> None:
    zeros = np.zeros((2, 1, 3))
    with np.errstate(invalid="ignore"):
        assert estimates_of(tally_of(zeros, zeros[:, 0]))["error2"] is None
        infinite = estimates_of(tally_of(zeros + np.inf, np.ones((2, 3))))
    assert infinite["error2"] is None
    assert infinite["bias2"] is None
