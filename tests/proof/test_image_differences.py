"""Elements of an operand that differ from the image of its source are counted, one by one or by tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from quantexp.formats import (
    quantise,
    resolve,
)
from quantexp.proof import image as image_module
from quantexp.proof.arithmetic import tables
from quantexp.proof.image import num_differing

from .image_cases import (
    normal,
    with_special_values,
)


@pytest.mark.parametrize("has_tables", [True, False])
@pytest.mark.parametrize(
    "name", ["mxfp8", "nvfp4", "hifp8", "fp8_e4m3", "nvfp4_16x16", "int4_g128"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_every_difference_counts_once(
    name: str, dtype: torch.dtype, axis: int, has_tables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_FEWEST", 2 if has_tables else 1 << 40)
    monkeypatch.setattr(tables, "_FEWEST_OF_ENTRY", 2.0**-30)
    spec = resolve(name)
    x = with_special_values(normal((7, 45, 33), axis).to(dtype))
    operand = quantise(x, spec, axis=axis)
    codes = operand.view(torch.int16)
    numbers = torch.randperm(codes.numel(), generator=torch.Generator().manual_seed(axis))
    changed = [at for at in numbers.tolist() if not codes.view(-1)[at].view(dtype).isnan()]
    codes.view(-1)[changed[:100]] ^= 1
    codes.view(-1)[changed[100:130]] ^= -1 << 15  # zeros among them
    assert num_differing(operand, x, spec, axis) == 130
    other_strides = operand.movedim(axis, 0).contiguous().movedim(0, axis)
    assert num_differing(other_strides, x, spec, axis) == 130
    if spec.fmt.across == 1:
        permuted = operand.permute(2, 0, 1), x.permute(2, 0, 1)
        assert num_differing(*permuted, spec, (axis + 1) % 3) == 130


@pytest.mark.parametrize("fewest", [2, 1 << 40])
def test_nan_equals_nan_of_any_bits_and_zeros_differ(
    fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_FEWEST", fewest)
    monkeypatch.setattr(tables, "_FEWEST_OF_ENTRY", 2.0**-30)
    for name in ("mxfp8", "fp8_e4m3"):
        x = normal((2, 64), 1).bfloat16()
        x[0, 3], x[1, 5] = math.nan, 0.0
        operand = quantise(x, name)
        assert operand[0, 3].isnan()
        operand[0, 3] = torch.tensor(-63, dtype=torch.int16).view(torch.bfloat16)
        assert operand[0, 3].isnan()
        assert num_differing(operand, x, resolve(name), -1) == 0
        operand[1, 5] = -0.0
        operand[0, 3] = 1.0
        assert num_differing(operand, x, resolve(name), -1) == 2


def test_a_large_operand_is_compared_by_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_module, "image", None)
    x = normal((512, 1024), 2).bfloat16()
    for name in ("mxfp8", "mxfp4", "nvfp4", "hifp8", "fp8_e4m3", "fp8_1x128_pow2"):
        for axis in (0, 1):
            operand = quantise(x, name, axis=axis)
            assert num_differing(operand, x, resolve(name), axis) == 0
            assert num_differing(x, x, resolve(name), axis) > x.numel() / 2
            other = quantise(x, name, axis=1 - axis)
            differs = (other != operand).sum()
            assert num_differing(other, x, resolve(name), axis) == differs


def test_a_table_as_large_as_the_operand_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_FEWEST", 2)
    x = normal((64, 128), 3, spread=60).bfloat16()
    spec = resolve("fp8_1x128")
    assert tables.num_differing(x, x, spec, 1, None) is None
    assert num_differing(quantise(x, spec), x, spec, 1) == 0


@pytest.mark.parametrize("num_rows", [4, 4096], ids=["by elements", "by tables"])
def test_a_lazy_sign_is_part_of_an_operand(num_rows: int) -> None:
    x = normal((num_rows, 32), 5).bfloat16()
    y = quantise(x, "mxfp8")
    assert num_differing(torch._neg_view(-y), x, resolve("mxfp8"), 1) == 0
    assert num_differing(torch._neg_view(y), x, resolve("mxfp8"), 1) == y.numel()


@pytest.mark.parametrize("rows", [256, 512])
def test_a_class_of_the_user_decides_the_image_of_operands_of_any_size(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 2^16 elements on, 16-bit operands of other formats are compared by tables, which no class has."""
    source = "class Coarse:\n    def quantise(self, x, *, axis, generator):\n        return (x * 4).round() / 4\n"
    name = f"image_of_a_class_{rows}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    spec = resolve(f"{name}:Coarse")
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounded = (x * 4).round() / 4
    assert num_differing(rounded, x, spec, -1, seed=1) == 0
    assert num_differing(x, x, spec, -1, seed=1) == int((x != rounded).sum()) > 0
