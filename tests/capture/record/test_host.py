"""Copies of tensors in host memory."""

from __future__ import annotations

import pytest
import torch

from quantexp.capture.record.host import host_copy


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(100_000.0),
        torch.arange(90_000).reshape(300, 300).T.bfloat16(),
        torch.zeros(3, 0),
        torch.tensor(2.5),
        torch.ones(4, requires_grad=True),
    ],
    ids=["large", "transposed", "empty", "scalar", "leaf"],
)
def test_a_copy_is_contiguous_and_its_own(x: torch.Tensor) -> None:
    expected = x.detach().clone()
    copied = host_copy(x)()
    x.detach().fill_(-1)
    assert copied.is_contiguous()
    assert not copied.requires_grad
    assert (copied.dtype, copied.shape) == (expected.dtype, expected.shape)
    assert torch.equal(copied, expected)
