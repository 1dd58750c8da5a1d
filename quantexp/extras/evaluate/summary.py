"""What an evaluation says: means over tokens, and the difference to bf16 with its interval over documents.

Tokens of one document depend on each other, so documents are resampled and not tokens (the bootstrap over clusters;
Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 8). Both losses come from the same tokens: what a
document makes harder in both cancels in the difference.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quantexp.runs.evaluation import DOCUMENT_COLUMNS

#: Fewer documents say nothing about their own spread.
FEWEST_DOCUMENTS = 8
_RESAMPLES = 2000
#: Documents drawn at once.
_MOST_DRAWN = 1 << 22
#: The largest loss whose exponential a float64 can represent.
_MAX_EXP = 709.0


def summary_of(sums: np.ndarray) -> dict[str, Any]:
    """The numbers of `quantexp.runs.evaluation.Evaluated`, without layer and module.

    Args:
        sums: the columns `DOCUMENT_COLUMNS` of each document, float64 [documents, columns].
    """
    totals = dict(zip(DOCUMENT_COLUMNS, sums.sum(0).tolist(), strict=True))
    tokens = totals.pop("tokens")
    means = {name: total / tokens if tokens else math.nan for name, total in totals.items()}
    column = DOCUMENT_COLUMNS.index
    differences = sums[:, column("loss")] - sums[:, column("bf16_loss")]
    loss = means["loss"]
    numbers = {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < _MAX_EXP else math.inf,
        "bf16_loss": means["bf16_loss"],
        "difference": differences.sum() / tokens if tokens else math.nan,
        "accuracy": means["correct"],
        "bf16_accuracy": means["bf16_correct"],
        "same_top": means["same_top"],
        "divergence": means["divergence"],
    }
    return {
        "tokens": round(tokens),
        "documents": len(sums),
        **{name: finite(value) for name, value in numbers.items()},
        "interval": interval(differences, sums[:, column("tokens")]),
    }


def interval(differences: np.ndarray, tokens: np.ndarray) -> list[float] | None:
    """The 95% interval of the difference of a token, by resampled documents; None with too few, or if not finite.

    Args:
        differences: the sum of each document, [documents].
        tokens: the tokens of each document, [documents].
    """
    number = len(tokens)
    if number < FEWEST_DOCUMENTS or not np.isfinite(differences).all():
        return None
    rng = np.random.default_rng(0)
    at_once = max(1, _MOST_DRAWN // number)
    means: list[np.ndarray] = []
    for first in range(0, _RESAMPLES, at_once):
        drawn = rng.integers(0, number, (min(at_once, _RESAMPLES - first), number))
        means.append(differences[drawn].sum(1) / tokens[drawn].sum(1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return [float(low), float(high)]


def finite(value: float) -> float | None:
    """The value, None if it is infinite or NaN."""
    return float(value) if math.isfinite(value) else None
