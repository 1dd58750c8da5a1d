"""Documents within a sequence, when attention does not cross document boundaries: the mask in a few numbers.

A query then sees the keys from the first token of its document up to itself, so the first visible key is the start of
the document.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def document_starts(mask_B1TT: Tensor) -> list[list[int]]:
    """The first tokens of each sequence's documents, ascending, from a mask that is True where a key is hidden."""
    first_BT = (~mask_B1TT).view(torch.uint8).argmax(-1).flatten(1)
    return [torch.unique(first_T).tolist() for first_T in first_BT]


def hidden(num_queries: int, num_keys: int, starts: Sequence[int] | None = None) -> Tensor:
    """True where a query does not see a key, [queries, keys]; the last query is aligned with the last key.

    Args:
        num_queries: fewer than `num_keys` if the queries are the last ones of a sequence.
        num_keys: keys of the whole sequence.
        starts: first tokens of separate documents; None means one document.
    """
    later = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
    if starts is None:
        return later
    document_K = torch.bucketize(torch.arange(num_keys), torch.tensor(starts), right=True)
    return later | (document_K[num_keys - num_queries :, None] != document_K[None])
