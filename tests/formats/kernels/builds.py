"""Shared by the tests of compiled code: its builds, the torch code instead of it, and comparison by bits."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from quantexp import compiled
from quantexp.formats import quantise
from quantexp.formats.kernels import torch_alone

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
#: Flags that follow the usual ones and select an older processor's code on any x86.
BUILDS = {"native": (), "avx2": ("-mno-avx512f",), "sse": ("-march=x86-64",)}

every_build = pytest.mark.parametrize("build", BUILDS, indirect=True)


@contextmanager
def compiled_for(build: str, functions: Any) -> Iterator[str]:
    """Compile for one kind of processor; `functions` is the cached function that loads the library."""
    if build != "native" and platform.machine() != "x86_64":
        pytest.skip("flags of x86")
    with patch.object(compiled, "FLAGS", (*compiled.FLAGS, *BUILDS[build])):
        for cached in (functions, compiled.library):
            cached.cache_clear()
        assert functions() is not None, "these tests need a C compiler"
        yield build
    for cached in (functions, compiled.library):
        cached.cache_clear()


def by_torch(x: Tensor, name: str, **options: Any) -> Tensor:
    """The result of `quantise` without kernels."""
    with torch_alone():
        return quantise(x, name, **options)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Compared as integers; all NaN count as equal."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    whole = torch.int32 if actual.dtype == torch.float32 else torch.int16
    bits, expected_bits = actual.contiguous().view(whole), expected.contiguous().view(whole)
    if torch.equal(bits, expected_bits):
        return
    differs = bits != expected_bits
    differs &= ~(actual.isnan() & expected.isnan())
    assert not differs.any(), (differs.sum(), actual[differs][:5], expected[differs][:5])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wild(dtype: torch.dtype, *shape: int, seed: int = 1, spread: float = 3.0) -> Tensor:
    """Many binades, zeros of either sign, zero blocks, a few NaN and Inf."""
    x = torch.randn(shape, generator=seeded(seed))
    x *= torch.exp2(torch.randn(shape, generator=seeded(seed + 1)) * spread)
    flat = x.view(-1)
    flat[::19], flat[5::23] = 0.0, -0.0
    flat[600:760] = -0.0
    flat[::1997], flat[400::2999], flat[800::3999] = torch.nan, torch.inf, -torch.inf
    return x.to(dtype)
