"""Tensors shared by the tests, and their comparison."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def every_value(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a 16-bit dtype, by their bits."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def every_finite_value(dtype: torch.dtype) -> Tensor:
    values = every_value(dtype)
    return values[values.isfinite()]


def as_numpy(x: Tensor) -> np.ndarray:
    """The values in float32, which represents those of bf16 and fp16."""
    return x.to(torch.float32).numpy()


def assert_same(actual: Tensor | np.ndarray, expected: Tensor | np.ndarray) -> None:
    """Equal bit for bit, signs of zeros included; NaN equals NaN of any payload."""
    a, b = (
        np.asarray(as_numpy(v) if isinstance(v, Tensor) else v, dtype=np.float32)
        for v in (actual, expected)
    )
    assert a.shape == b.shape
    differs = (a.view(np.int32) != b.view(np.int32)) & ~(np.isnan(a) & np.isnan(b))
    where = np.argwhere(np.atleast_1d(differs))[:5]
    assert not differs.any(), (
        f"{differs.sum()} differ, at {where.tolist()}: {a[differs][:5]} {b[differs][:5]}"
    )


def sqnr_db(x: Tensor, y: Tensor) -> float:
    x64, y64 = x.double(), y.double()
    return float(10 * torch.log10(x64.square().sum() / (x64 - y64).square().sum()))
