"""A synthetic language whose entropy is known, so that losses have a known floor; nothing is downloaded.

It is a Markov source: every symbol depends on the three symbols before it. Its distribution is a mixture of three,
which depend on the last one, two and three symbols and are drawn once. So there is something to learn at every length
of training: 32 distributions in the first steps, then 1,024, then 32,768. A document is a stretch of the source in its
stationary state.

    # C contexts, S symbols, D documents
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SYMBOLS = "abcdefghijklmnopqrstuvwxyz .,;:-"
#: The share of the distributions that depend on the last one, two and three symbols.
SHARES = (0.4, 0.35, 0.25)
NUM_DOCUMENTS, DOCUMENT_LENGTH = 4096, 4096
_NUM_CONTEXTS = len(SYMBOLS) ** len(SHARES)
#: The concentration of the Dirichlet distribution of a context's probabilities: two or three symbols are likely.
_CONCENTRATION = 0.08
_SEED = 1
_BURN_IN = 64


def write_documents(file: Path) -> None:
    """Write all documents as JSON lines; 17 MB, in seconds."""
    text = np.frombuffer(SYMBOLS.encode(), dtype=np.uint8)[_symbols()]
    with file.open("w", encoding="utf-8") as stream:
        for document in text:
            stream.write(json.dumps({"text": document.tobytes().decode()}) + "\n")


@cache
def _source() -> NDArray[np.float64]:
    """The probabilities of each context's symbols; any version of numpy draws the same by `RandomState`."""
    random = np.random.RandomState(_SEED)
    p_CS = np.zeros((_NUM_CONTEXTS, len(SYMBOLS)))
    for order, share in enumerate(SHARES, 1):
        shape = (len(SYMBOLS) ** order, len(SYMBOLS))
        weights = random.standard_gamma(_CONCENTRATION, shape) + 1e-12
        p_CS += share * np.tile(
            weights / weights.sum(1, keepdims=True), (_NUM_CONTEXTS // shape[0], 1)
        )
    return p_CS


def _following(context: NDArray[np.int64], symbol: NDArray[np.int64]) -> NDArray[np.int64]:
    following: NDArray[np.int64] = (context * len(SYMBOLS) + symbol) % _NUM_CONTEXTS
    return following


def _symbols() -> NDArray[np.int64]:
    """The documents' symbols, [D, length]."""
    limits_CS = np.cumsum(_source(), axis=1)
    random = np.random.RandomState(_SEED + 1)
    context_D = random.randint(_NUM_CONTEXTS, size=NUM_DOCUMENTS)
    symbols = np.empty((DOCUMENT_LENGTH, NUM_DOCUMENTS), dtype=np.int64)
    for i in range(-_BURN_IN, DOCUMENT_LENGTH):
        drawn_D = random.random_sample(NUM_DOCUMENTS)
        symbol_D = (drawn_D[:, None] > limits_CS[context_D, :-1]).sum(1)
        if i >= 0:
            symbols[i] = symbol_D
        context_D = _following(context_D, symbol_D)
    return symbols.T
