"""The norm of a gradient: numpy's in float64, in any strips."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantexp.training.megatron import grad_norm
from quantexp.training.megatron.grad_norm import sum_of_squares
from tests.fake_gpu import on_fake_gpu


def test_strips_of_any_length_add_up_to_the_sum_of_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    expected = float((x.numpy().astype(np.float64) ** 2).sum())
    for length in (1, 7, 1000, 2000):
        monkeypatch.setattr(grad_norm, "STRIP", length)
        # A thousand float64 roundings of 2^-53 each.
        assert float(sum_of_squares(x)) == pytest.approx(expected, rel=1000 * 2.0**-53)


def test_on_a_gpu_a_gradient_takes_few_operations() -> None:
    operations = on_fake_gpu(lambda device: sum_of_squares(torch.empty(14336, 4096, device=device)))
    # 4 strips with 5 operations each; 56 strips of a CPU's length would take some 250.
    assert len(operations) < 40
