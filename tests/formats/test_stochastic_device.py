"""Stochastic rounding on a GPU draws the numbers of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantexp.formats import FORMATS, quantise

from .tensors import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if "seed" in fmt.options])
def test_rounds_every_element_as_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(300, 1027, generator=torch.Generator().manual_seed(1)).to(dtype)
    for axis in (0, 1):
        draw: dict[str, Any] = {
            "rounding": "stochastic",
            "seed": 12345678901234567890,
            "offset": 42,
        }
        expected = quantise(x, name, axis=axis, **draw)
        assert_same(quantise(x.cuda(), name, axis=axis, **draw).cpu(), expected)
