"""Tensors of more than 2^31 elements, which no 32-bit index reaches: sparse files, mapped into memory.

A test takes up to 4 GiB of memory: the file's pages are private copies once they are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.formats import decode, encode, finite_amax, quantise, saturated, scales_of

pytestmark = pytest.mark.exhaustive

ROW = 1 << 16
NUM_ROWS = (1 << 15) + 1
NUM_ELEMENTS = NUM_ROWS * ROW
#: Values around each index at which a 32-bit integer, or its use as an unsigned one, would wrap.
VALUES = torch.linspace(-3.0, 3.0, 96)
STARTS = (0, (1 << 31) - 32, NUM_ELEMENTS - 96)


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Any]:
    """Maps a sparse file as zeros of a dtype."""
    path = tmp_path / "sparse"

    def zeros(dtype: torch.dtype) -> Tensor:
        size = NUM_ELEMENTS * dtype.itemsize
        with path.open("wb") as file:
            file.truncate(size)
        return torch.from_file(str(path), shared=False, size=NUM_ELEMENTS, dtype=dtype)

    yield zeros
    path.unlink()


def with_values(x: Tensor) -> Tensor:
    for start in STARTS:
        x[start : start + 96] = VALUES
    return x


def sample(x: Tensor) -> Tensor:
    """The values, and a part of the zeros."""
    return torch.stack([x[start : start + 96] for start in (*STARTS, 1 << 30)]).clone()


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mxfp8", {"scale_rule": "rceil"}),
    ("mxfp4", {"rounding": "away"}),
    ("hifp8", {"scaling": "current"}),
    ("fp8_e4m3", {}),
    ("nvfp4", {}),
)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_quantising_reaches_every_element(name: str, options: dict[str, Any], mapped: Any) -> None:
    x = with_values(mapped(torch.bfloat16))
    expected = quantise(sample(x), name, **options)
    assert quantise(x, name, out=x, **options) is x
    assert torch.equal(sample(x), expected)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_blocks_across_memory_reach_every_element(name: str, mapped: Any) -> None:
    x = with_values(mapped(torch.bfloat16))
    grid = x.view(NUM_ROWS, ROW)
    columns = grid[-64:, -96:].clone()
    amax = finite_amax(x) if name == "nvfp4" else None
    # The last of 2^15 + 1 rows is a block by itself.
    expected = quantise(columns[-1:], name, axis=0, amax=amax)
    quantise(grid, name, axis=0, out=grid)
    assert torch.equal(grid[-1:, -96:], expected)


def test_amax_saturation_and_scales_reach_every_element(mapped: Any) -> None:
    x = mapped(torch.bfloat16)
    x[-1] = 500.0
    assert finite_amax(x) == 500.0
    beyond = saturated(x, "mxfp8")
    assert beyond[-1].item()
    assert beyond.nonzero().tolist() == [[NUM_ELEMENTS - 1]]
    del beyond
    scales = scales_of(x, "mxfp8")
    assert isinstance(scales, Tensor)
    assert scales.nonzero().tolist() == [[NUM_ELEMENTS // 32 - 1]]


@pytest.mark.parametrize(("name", "packed"), [("mxfp8", False), ("mxfp4", True), ("hifp8", False)])
def test_encoding_reaches_every_element(name: str, packed: bool, mapped: Any) -> None:
    x = with_values(mapped(torch.bfloat16))
    small, _ = encode(sample(x), name)
    codes, _ = encode(x, name, packed=packed)
    if packed:
        codes = torch.stack([codes[start // 2 : start // 2 + 48] for start in (*STARTS, 1 << 30)])
        codes = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)
    else:
        codes = sample(codes)
    assert torch.equal(codes, small)


def test_decoding_reaches_every_element(mapped: Any) -> None:
    codes = mapped(torch.uint8)
    codes[-1] = 0x38
    scales = torch.full((NUM_ELEMENTS // 32,), 127, dtype=torch.uint8)
    scales[-1] = 130
    y = decode(codes, scales, "mxfp8", dtype=torch.bfloat16)
    assert y[-1].item() == 8.0
    assert not y[:-1].any()
