"""Two copies of a tensor along two axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantexp.formats import FORMATS, quantise, quantise_both, resolve
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.definitions.files import declared_by_name
from quantexp.formats.kernels import cpu

from .kernels.builds import DTYPES, assert_same_bits, wild

SQUARE = declared_by_name("nvfp4_16x16", {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compiled", [True, False])
def test_the_copies_are_those_of_quantise(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(cpu, "functions", lambda: None)
    for shape in ((64, 96), (70, 33), (3, 40, 50), (2, 35, 3, 40), (600, 700), (1, 1), (70, 1)):
        x = wild(dtype, *shape)
        ends = range(-len(shape), 0)
        for axes in ((first, second) for first in ends for second in ends):
            for block in (1, 16, 32, 64, 128):
                options: dict[str, Any] = {"block": block, "scale_rule": "rceil"}
                for y, axis in zip(
                    quantise_both(x, resolve("mxfp8", **options), axes=axes), axes, strict=True
                ):
                    assert_same_bits(y, quantise(x, "mxfp8", axis=axis, **options))


def test_a_kernel_reads_x_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any order of the axes and any memory layout of x, if one axis is the last in memory."""
    monkeypatch.setattr("quantexp.formats.two_axes.quantise", None)
    x = wild(torch.bfloat16, 64, 128)
    for view in (x, x.t(), x.view(4, 16, 128).transpose(0, 1)):
        quantise_both(view, "mxfp4", axes=(0, view.ndim - 1))
        quantise_both(view, "mxfp4", axes=(-1, 0))


def test_square_blocks_of_three_axes_have_other_rows_along_each() -> None:
    x = wild(torch.float32, 3, 40, 130)
    for axes in ((0, 1), (1, 2), (2, 0)):
        for y, axis in zip(quantise_both(x, SQUARE, axes=axes), axes, strict=True):
            assert_same_bits(y, quantise(x, SQUARE, axis=axis))


def test_a_block_that_replaces_one_of_single_elements_lies_along_its_axis() -> None:
    fmt = declared_format("one", {"element": "int8", "block": 1})
    x, spec = wild(torch.float32, 40, 130), resolve(fmt, block=16)
    for y, axis in zip(quantise_both(x, spec, axes=(0, 1)), (0, 1), strict=True):
        assert_same_bits(y, quantise(x, spec, axis=axis))


def test_large_copies_are_those_of_quantise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x = wild(torch.bfloat16, 4096, 4128)
    for y, axis in zip(quantise_both(x, "mxfp8", axes=(0, 1)), (0, 1), strict=True):
        assert_same_bits(y, quantise(x, "mxfp8", axis=axis))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("strided", [False, True])
def test_out_is_filled_and_returned(name: str, strided: bool) -> None:
    x = wild(torch.float32, 40, 50)
    first, second = (torch.empty(50, 40).t() if strided else torch.empty_like(x) for _ in range(2))
    out = (first, second)
    copies = quantise_both(x, name, axes=(0, 1), out=out)
    for y, there, axis in zip(copies, out, (0, 1), strict=True):
        assert y is there
        assert_same_bits(y, quantise(x, name, axis=axis))


@pytest.mark.parametrize("name", ["hifp8", "fp8_e4m3", "bf16"])
def test_without_blocks_it_is_one_tensor_twice(name: str) -> None:
    first, second = quantise_both(wild(torch.float32, 4, 64), name, axes=(0, 1))
    assert first is second


def test_one_axis_twice_is_one_tensor() -> None:
    x = wild(torch.float32, 4, 64)
    first, second = quantise_both(x, "mxfp8", axes=(1, -1))
    assert first is second
    assert_same_bits(first, quantise(x, "mxfp8"))


def test_options_reach_the_arithmetic() -> None:
    x = wild(torch.float32, 64, 64)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "mxfp4": ({"rounding": "stochastic"}, {"seed": 7}),
        "nvfp4": ({}, {"amax": torch.tensor(3.0)}),
        "hifp8": ({"scaling": "current"}, {"amax": torch.tensor(3.0)}),
    }
    for name, (options, of_call) in cases.items():
        for y, axis in zip(
            quantise_both(x, resolve(name, **options), axes=(0, 1), **of_call), (0, 1), strict=True
        ):
            assert_same_bits(y, quantise(x, name, axis=axis, **options, **of_call))


def test_empty_tensors_stay_empty() -> None:
    for shape in ((0, 4), (4, 0), (3, 0, 5)):
        first, second = quantise_both(torch.ones(shape), "mxfp8", axes=(0, -1))
        assert first.shape == second.shape == shape


def test_invalid_arguments_are_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"axis must lie in \[-2, 1\], got 2"):
        quantise_both(x, "mxfp8", axes=(0, 2))
    with pytest.raises(ValueError, match="out must have x's shape"):
        quantise_both(x, "mxfp8", axes=(0, 1), out=(torch.empty(2, 3), torch.empty(3, 2)))
    with pytest.raises(ValueError, match="mxfp8_e4m3 has no option amax"):
        quantise_both(x, "mxfp8", axes=(0, 1), amax=torch.ones(()))
    with pytest.raises(ValueError, match="seed has no meaning with rounding 'even'"):
        quantise_both(x, "mxfp8", axes=(0, 1), seed=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'block'"):
        quantise_both(x, "mxfp8", axes=(0, 1), block=16)  # type: ignore[call-arg]


@pytest.mark.parametrize("axes", [(0,), 0, (0, 1, 1), None])
def test_axes_are_a_pair(axes: Any) -> None:
    with pytest.raises(TypeError, match="axes must be a pair of integers, got "):
        quantise_both(torch.ones(4, 4), "mxfp8", axes=axes)


def test_compiled_copies_into_x_itself_are_those_of_x() -> None:
    def both(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantise_both(x, "mxfp8", axes=(0, 1), out=(x, out))

    x = torch.randn(64, 64)
    expected = [quantise(x, "mxfp8", axis=axis) for axis in (0, 1)]
    y, z = torch.compile(both, backend="eager", fullgraph=True)(x, torch.empty_like(x))
    assert y is x
    assert torch.equal(y, expected[0])
    assert torch.equal(z, expected[1])


def test_one_destination_for_both_copies_is_refused() -> None:
    x, out = torch.ones(4, 4), torch.empty(4, 4)
    with pytest.raises(ValueError, match="nor the copies with each other"):
        quantise_both(x, "mxfp8", axes=(0, 1), out=(out, out))
