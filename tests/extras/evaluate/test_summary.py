"""Numbers of an evaluation against their definitions, and the coverage of its interval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantexp.extras.evaluate.summary import FEWEST_DOCUMENTS, interval, summary_of
from quantexp.runs.evaluation import DOCUMENT_COLUMNS


def sums(**columns: list[float]) -> np.ndarray:
    length = len(next(iter(columns.values())))
    return np.stack([columns.get(n, np.zeros(length)) for n in DOCUMENT_COLUMNS], axis=1)


def test_means_are_over_tokens_not_over_documents() -> None:
    summary = summary_of(
        sums(
            tokens=[1, 3],
            loss=[4.0, 4.0],
            bf16_loss=[2.0, 4.0],
            correct=[1, 1],
            bf16_correct=[0, 3],
            same_top=[1, 2],
            divergence=[0.4, 0.0],
        )
    )
    assert summary == {
        "tokens": 4,
        "documents": 2,
        "loss": 2.0,
        "perplexity": pytest.approx(math.exp(2.0)),
        "bf16_loss": 1.5,
        "difference": 0.5,
        "accuracy": 0.5,
        "bf16_accuracy": 0.75,
        "same_top": 0.75,
        "divergence": pytest.approx(0.1),
        "interval": None,
    }


def test_loss_that_is_not_finite_is_null() -> None:
    number = FEWEST_DOCUMENTS
    loss = [math.nan, *[1.0] * (number - 1)]
    summary = summary_of(sums(tokens=[1.0] * number, loss=loss, bf16_loss=[1.0] * number))
    unknown = ("loss", "difference", "interval")
    assert [summary[name] for name in unknown] == [None] * 3
    assert summary["bf16_loss"] == 1.0


def test_perplexity_beyond_float64_is_null() -> None:
    assert summary_of(sums(tokens=[1.0], loss=[1e4], bf16_loss=[1.0]))["perplexity"] is None


def test_interval_holds_the_true_difference_nineteen_of_twenty_times() -> None:
    """Documents of unequal length whose tokens share a shift; 300 trials.

    The share of a binomial with 300 trials and 0.95 lies in [0.91, 0.98] but for one in a thousand; the percentile
    bootstrap over 60 documents is known to be short by a percent or two.
    """
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(300):
        tokens = rng.integers(20, 400, 60).astype(float)
        shift = 0.01 + 0.05 * rng.standard_normal(60)
        low, high = interval(shift * tokens, tokens) or (math.nan, math.nan)
        inside += low <= 0.01 <= high
    assert 0.88 <= inside / 300 <= 0.98


def test_interval_is_wider_where_documents_are_fewer_than_their_tokens_suggest() -> None:
    """Ten documents with a shift of their own say less than as many tokens of a thousand documents."""
    rng = np.random.default_rng(1)

    def width(documents: int) -> float:
        tokens = np.full(documents, 10_000 / documents)
        summary = interval(0.1 * rng.standard_normal(documents) * tokens, tokens)
        assert summary is not None
        return summary[1] - summary[0]

    assert width(10) > 5 * width(1000)


def test_few_documents_have_no_interval() -> None:
    number = FEWEST_DOCUMENTS
    one = np.ones(number)
    assert interval(one[1:], one[1:]) is None
    assert interval(one, one) == [1.0, 1.0]
