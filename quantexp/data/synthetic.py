"""A synthetic language whose entropy is known, so that losses have a known floor; nothing is downloaded.

It is a Markov source: every symbol depends on the `ORDER` symbols before it. Each of these contexts is followed by one
of `SUCCESSORS` symbols, with probabilities that are drawn once, so a model has 230,000 numbers to learn. A document is
a stretch of the source in its stationary state.

    # C contexts, S successors of each, D documents
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SYMBOLS = "abcdefghijklmnopqrstuvwxyz .,;:-"
ORDER, SUCCESSORS = 3, 8
NUM_DOCUMENTS, DOCUMENT_LENGTH = 4096, 4096
_NUM_CONTEXTS = len(SYMBOLS) ** ORDER
#: The concentration of the Dirichlet distribution of a context's probabilities: one or two symbols are likely.
_CONCENTRATION = 0.5
_SEED = 1
_BURN_IN = 64
#: Steps of the power iteration; the distance to the stationary state falls by a constant factor at each.
_STEPS = 200


def write_documents(file: Path) -> None:
    """Write all documents as JSON lines; 17 MB, in seconds."""
    text = np.frombuffer(SYMBOLS.encode(), dtype=np.uint8)[_symbols()]
    with file.open("w", encoding="utf-8") as stream:
        for document in text:
            stream.write(json.dumps({"text": document.tobytes().decode()}) + "\n")


def entropy_rate() -> float:
    """The entropy of a symbol whose context is known, in nats: no model's mean loss is lower."""
    successors_CS, p_CS = _source()
    next_CS = _following(np.arange(_NUM_CONTEXTS)[:, None], successors_CS).ravel()
    state_C = np.full(_NUM_CONTEXTS, 1 / _NUM_CONTEXTS)
    for _ in range(_STEPS):
        moved = np.bincount(next_CS, (state_C[:, None] * p_CS).ravel(), _NUM_CONTEXTS)
        state_C = moved / moved.sum()
    return float(-(state_C[:, None] * p_CS * np.log(p_CS)).sum())


@cache
def _source() -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The successors of each context and their probabilities; any version of numpy draws the same by `RandomState`."""
    random = np.random.RandomState(_SEED)
    order = np.argsort(random.random_sample((_NUM_CONTEXTS, len(SYMBOLS))), axis=1, kind="stable")
    weights_CS = random.standard_gamma(_CONCENTRATION, (_NUM_CONTEXTS, SUCCESSORS)) + 1e-12
    return order[:, :SUCCESSORS], weights_CS / weights_CS.sum(1, keepdims=True)


def _following(context: NDArray[np.int64], symbol: NDArray[np.int64]) -> NDArray[np.int64]:
    following: NDArray[np.int64] = (context * len(SYMBOLS) + symbol) % _NUM_CONTEXTS
    return following


def _symbols() -> NDArray[np.int64]:
    """The documents' symbols, [D, length]."""
    successors_CS, p_CS = _source()
    limits_CS = np.cumsum(p_CS, axis=1)
    random = np.random.RandomState(_SEED + 1)
    context_D = random.randint(_NUM_CONTEXTS, size=NUM_DOCUMENTS)
    symbols = np.empty((DOCUMENT_LENGTH, NUM_DOCUMENTS), dtype=np.int64)
    for i in range(-_BURN_IN, DOCUMENT_LENGTH):
        drawn_D = random.random_sample(NUM_DOCUMENTS)
        choice_D = (drawn_D[:, None] > limits_CS[context_D, :-1]).sum(1)
        symbol_D = successors_CS[context_D, choice_D]
        if i >= 0:
            symbols[i] = symbol_D
        context_D = _following(context_D, symbol_D)
    return symbols.T
