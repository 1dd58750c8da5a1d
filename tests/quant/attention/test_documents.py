from __future__ import annotations

import pytest
import torch

from quantexp.quant.attention.documents import document_starts, hidden

T = 12


def mask_of(starts: list[int]) -> torch.Tensor:
    """As in Megatron's dataset: causal, and the later tokens of a document do not see earlier documents."""
    visible = torch.tril(torch.ones(T, T))
    for start in starts:
        visible[start:, :start] = 0
    return visible < 0.5


@pytest.mark.parametrize("starts", [[0], [0, 1], [0, 5, 6], [0, 4, 11], list(range(T))])
def test_documents_are_read_from_a_mask_and_make_it_again(starts: list[int]) -> None:
    other = [0, 7]
    masks = torch.stack([mask_of(starts), mask_of(other)])[:, None]
    assert document_starts(masks) == [starts, other]
    assert torch.equal(hidden(T, T, starts), mask_of(starts))


def test_one_document_is_causal_and_the_last_query_sees_all() -> None:
    assert torch.equal(hidden(T, T), mask_of([]))
    assert torch.equal(hidden(3, T), mask_of([])[-3:])
    assert torch.equal(hidden(3, T, [0, 5, 10]), mask_of([0, 5, 10])[-3:])
