"""Measures of tokens against scipy, and their sums by document against a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scipy.stats import entropy

from quantexp.extras.evaluate import token_measures as module
from quantexp.extras.evaluate.token_measures import (
    NUM_MEASURES,
    DocumentSums,
    TokenMeasure,
    token_measures,
)

B, T, V = 2, 5, 11


def logits(seed: int) -> torch.Tensor:
    return torch.randn(B, T, V, generator=torch.Generator().manual_seed(seed), dtype=torch.bfloat16)


@pytest.mark.parametrize("strip", [V, 3 * V, 1 << 22])
def test_measures_are_those_of_scipy(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STRIP", strip)
    reference, other = logits(1), 3 * logits(2)
    labels = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(3))
    measures = token_measures(reference, other, labels)
    p, q = (log_softmax(x.double().numpy(), axis=-1) for x in (reference, other))
    at = labels.numpy()[..., None]
    expected = {
        TokenMeasure.TOKENS: np.ones((B, T)),
        TokenMeasure.LOSS: -np.take_along_axis(q, at, -1)[..., 0],
        TokenMeasure.REFERENCE_LOSS: -np.take_along_axis(p, at, -1)[..., 0],
        TokenMeasure.CORRECT: q.argmax(-1) == labels.numpy(),
        TokenMeasure.REFERENCE_CORRECT: p.argmax(-1) == labels.numpy(),
        TokenMeasure.SAME_TOP: p.argmax(-1) == q.argmax(-1),
        TokenMeasure.DIVERGENCE: entropy(np.exp(p), np.exp(q), axis=-1),
    }
    assert measures.shape == (NUM_MEASURES, B, T)
    assert len(expected) == NUM_MEASURES
    for measure, values in expected.items():
        # Both compute in float64; log-softmax of 11 logits loses a few units in the last place.
        np.testing.assert_allclose(measures[measure], values, rtol=1e-12, atol=1e-14)


def test_equal_logits_do_not_differ() -> None:
    x = logits(1)
    measures = token_measures(x, x.clone(), torch.zeros(B, T, dtype=torch.int64))
    assert torch.equal(measures[TokenMeasure.LOSS], measures[TokenMeasure.REFERENCE_LOSS])
    assert float(measures[TokenMeasure.DIVERGENCE].abs().max()) == 0
    assert bool((measures[TokenMeasure.SAME_TOP] == 1).all())


def test_logit_of_nan_makes_its_token_nan() -> None:
    x, spoilt = logits(1), logits(1)
    spoilt[0, 0, 0] = torch.nan
    measures = token_measures(x, spoilt, torch.zeros(B, T, dtype=torch.int64))
    for measure in (TokenMeasure.LOSS, TokenMeasure.DIVERGENCE):
        assert measures[measure].isnan().nonzero().tolist() == [[0, 0]]


def test_sums_leave_masked_tokens_out_and_keep_documents_and_maps_apart() -> None:
    measures = torch.arange(NUM_MEASURES * B * T, dtype=torch.float64).view(NUM_MEASURES, B, T)
    mask = torch.ones(B, T)
    mask[0, 1] = 0
    documents = torch.tensor([[7, 7, 7, 2, 2], [2, 2, 9, 9, 9]])
    halves = [DocumentSums(2), DocumentSums(2)]
    for row, half in enumerate(halves):
        half.add(1, measures[:, row : row + 1], mask[row : row + 1], documents[row : row + 1])
    halves[0].include(halves[1].sums)
    names, table = halves[0].table()
    assert names == [2, 7, 9]
    assert table.shape == (3, 2, NUM_MEASURES)
    assert float(table[:, 0].abs().max()) == 0, "nothing was added under the first map"
    for index, name in enumerate(names):
        chosen = (documents == name) & (mask != 0)
        assert torch.equal(table[index, 1], measures[:, chosen].sum(1))


def test_no_tokens_give_an_empty_table() -> None:
    names, table = DocumentSums(3).table()
    assert (names, table.shape) == ([], (0, 3, NUM_MEASURES))
