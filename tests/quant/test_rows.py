"""The layout of an expert's tokens for blocks along tokens, by hand and against one sequence at a time."""

from __future__ import annotations

import torch

from quantexp.formats import quantise
from quantexp.quant.rows import Rows


def test_rows_of_each_sequence_lie_one_below_the_other_with_zeros_below() -> None:
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])
    laid_out = Rows(torch.tensor([2, 0, 2, 2]), 3).laid_out(x)
    expected = torch.zeros(3, 3, 2)
    expected[:, 2] = x[[0, 2, 3]]
    expected[0, 0] = x[1]
    assert torch.equal(laid_out, expected)


def test_no_rows_are_no_layout() -> None:
    assert Rows(torch.zeros(0, dtype=torch.int64), 2).laid_out(torch.zeros(0, 5)).shape == (0, 2, 5)


def test_blocks_are_those_of_each_sequence_by_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randint(0, 3, (150,), generator=generator)
    x = torch.randn(150, 4, generator=generator) * 10
    quantised = quantise(Rows(sequence, 3).laid_out(x), "mxfp4", axis=0)
    for b in range(3):
        own = x[sequence == b]
        assert torch.equal(quantised[: len(own), b], quantise(own, "mxfp4", axis=0))
        assert not quantised[len(own) :, b].any()


def test_tokens_of_a_source_are_as_many_as_its_longest_sequence_has() -> None:
    """Sequences 0 and 1 are the first source's, 2 and 3 the second's; the longest of all has three rows."""
    rows = Rows(torch.tensor([2, 0, 2, 3, 2]), 4, (0, 1))
    assert rows.of_source(0).tolist() == [1]
    assert rows.of_source(1).tolist() == [0, 2, 3, 4]
    assert rows.of_source(0, is_laid_out=True).tolist() == [0, 1]
    assert rows.of_source(1, is_laid_out=True).tolist() == [2, 3, 6, 7, 10, 11]


def test_source_without_rows_has_no_tokens() -> None:
    rows = Rows(torch.tensor([0, 0]), 2, (0, 1))
    assert rows.of_source(1).tolist() == rows.of_source(1, is_laid_out=True).tolist() == []


def test_product_over_tokens_is_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randint(0, 2, (9,), generator=generator)
    g, x = torch.randn(2, 9, 3, generator=generator, dtype=torch.float64)
    rows = Rows(sequence, 2)
    product = rows.laid_out(g).reshape(-1, 3).t() @ rows.laid_out(x).reshape(-1, 3)
    assert torch.allclose(product, g.t() @ x, rtol=1e-12)  # another order of float64's summands
