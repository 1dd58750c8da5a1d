"""The GPU kernels against the torch code, bit for bit, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from quantexp.formats.families import tensor_scale
from quantexp.formats.spec import QuantSpec, resolve

from ..tensors import assert_same, every_value  # noqa: TID252
from . import gpu_cases as cases
from .gpu_cases import Call, check, check_both, needs_triton, reference

pytestmark = needs_triton
Interpreter = Callable[[str], AbstractContextManager[Call]]


@pytest.fixture(scope="module")
def call(triton_interpreter: Interpreter) -> Iterator[Call]:
    """Call a function of the kernels' module in the interpreter."""
    with triton_interpreter("quantexp.formats.kernels.gpu") as request:
        yield request


@pytest.mark.parametrize("rule", cases.RULES)
@pytest.mark.parametrize("fmt", cases.MX)
def test_every_bfloat16_value_in_rows_and_columns(call: Call, fmt: str, rule: str) -> None:
    check_both(call, cases.spread(torch.bfloat16), cases.mx(fmt, rule))


@pytest.mark.exhaustive
@pytest.mark.parametrize("rounding", ["even", "away"])
@pytest.mark.parametrize("rule", cases.RULES)
@pytest.mark.parametrize("fmt", cases.MX)
def test_every_16_bit_value_alone_in_either_direction(
    call: Call, fmt: str, rule: str, rounding: str
) -> None:
    options = cases.mx(fmt, rule, rounding)
    for dtype in (torch.bfloat16, torch.float16):
        for x in (cases.spread(dtype), cases.mixed(dtype)):
            check_both(call, x, options)
            check(call, x, options, 1)


@pytest.mark.parametrize("fmt", cases.MX)
def test_float32_at_ties_and_ends_under_every_rule(call: Call, fmt: str) -> None:
    x = torch.cat([cases.hard_float32(64), cases.amax_at_ends()[::23]])
    for rule in cases.RULES:
        check_both(call, x, cases.mx(fmt, rule))


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", cases.RULES)
@pytest.mark.parametrize("fmt", cases.MX)
def test_much_float32_under_every_rule(call: Call, fmt: str, rule: str) -> None:
    check_both(call, cases.much_float32(), cases.mx(fmt, rule))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("shape", "axis"), cases.SHAPES)
def test_every_shape_and_axis(
    call: Call, shape: tuple[int, ...], axis: int, dtype: torch.dtype
) -> None:
    check(call, cases.noise(shape, dtype), cases.mx("mxfp8", "rceil", "away"), axis)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("shape", "axis"), cases.BOTH_SHAPES)
def test_both_copies_of_every_shape(
    call: Call, shape: tuple[int, ...], axis: int, dtype: torch.dtype
) -> None:
    check_both(call, cases.noise(shape, dtype), cases.mx("mxfp4", "floor"), axis)


@pytest.mark.parametrize("options", cases.HIF8, ids=cases.words)
def test_every_bfloat16_value_becomes_hifloat8(call: Call, options: QuantSpec) -> None:
    # amax is not the tensor's largest by far, so that most of its values lie in the middle of the format
    for amax in (None, torch.tensor(3.0)) if options.scaling.value != "none" else (None,):
        check(call, every_value(torch.bfloat16), options, 0, amax)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", cases.HIF8, ids=cases.words)
def test_every_16_bit_value_and_hard_float32_become_hifloat8(
    call: Call, options: QuantSpec
) -> None:
    scaled = options.scaling.value != "none"
    x32 = cases.hard_float32(2048)
    for x in (every_value(torch.bfloat16), every_value(torch.float16), x32, x32.exp2().pow(5)):
        for amax in (None, torch.tensor(3.0), torch.tensor(2.0**-30)) if scaled else (None,):
            check(call, x, options, 0, amax)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("scaling", ["none", "current", "exact"])
def test_hifloat8_of_an_odd_number_of_elements(
    call: Call, scaling: str, dtype: torch.dtype
) -> None:
    for saturate in (True, False):
        options = resolve("hifp8", scaling=scaling, saturate=saturate)
        check(call, cases.noise((3, 1367), dtype), options, 1)


@pytest.mark.parametrize("amax", [1e-38, 2.0**-133, 3e38, 0.0, torch.nan])
def test_hifloat8_under_scales_at_the_ends_of_their_range_keeps_zeros(
    call: Call, amax: float
) -> None:
    x = torch.tensor([0.0, -0.0, 2.0**-133, -(2.0**-130), 1e-38, -3e-39, 1.0, 3e38, -3e38] * 2)
    for dtype in cases.DTYPES:
        for scaling in ("current", "exact"):
            options = resolve("hifp8", scaling=scaling)
            check(call, x.to(dtype), options, 0, torch.tensor(amax))


@pytest.mark.parametrize(("halfway", "even"), [(257.0, 256.0), (259.0, 260.0)])
def test_quotients_halfway_between_two_bfloat16_become_the_even_one(
    call: Call, halfway: float, even: float
) -> None:
    """hif8 of x s is 1, and 1 / s in float32 has nine significant bits."""
    x, options = torch.tensor([256.0, 258.0, 260.0]).bfloat16(), resolve("hifp8", scaling="exact")
    scale = tensor_scale(x, options, torch.tensor(15 * halfway))
    assert 1 / scale == halfway  # type: ignore[operator]
    y = call("quantise", x, torch.empty_like(x), options, 0, scale)[1]
    assert_same(y, torch.full((3,), even))


@pytest.mark.parametrize("fmt", ["mxfp8", "hifp8"])
@pytest.mark.parametrize(("shape", "axis"), [((40, 64), 1), ((40, 70), 1), ((40, 70), 0)])
def test_in_place(call: Call, fmt: str, shape: tuple[int, ...], axis: int) -> None:
    x, options = cases.noise(shape, torch.bfloat16), resolve(fmt)
    assert_same(call("quantise", x, x, options, axis, None)[0], reference(x, options, axis))


@pytest.mark.parametrize("which", ["columns", "rows"])
def test_either_copy_may_take_the_place_of_the_original(call: Call, which: str) -> None:
    x, options = cases.noise((40, 70), torch.bfloat16), resolve("mxfp8")
    other = torch.empty_like(x)
    columns, rows = (x, other) if which == "columns" else (other, x)
    _, columns, rows, _, _ = call("quantise_both", x, columns, rows, options, 0)
    assert_same(columns, reference(x, options, 0))
    assert_same(rows, reference(x, options, 1))


def test_a_tensor_that_starts_between_pairs(call: Call) -> None:
    memory = cases.noise((64 * 33 + 1,), torch.bfloat16)
    x = memory[1:].view(33, 64)
    assert x.data_ptr() % 4 == 2
    for fmt, axis in (("mxfp8", 0), ("mxfp8", 1), ("hifp8", 0)):
        check(call, x, resolve(fmt), axis)
    check_both(call, x, resolve("mxfp8"))


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 40, 70), 1), ((200, 45), 0), ((3, 200, 2, 45), 1)]
)
def test_a_grid_that_is_too_small_for_one_launch(
    call: Call, shape: tuple[int, ...], axis: int
) -> None:
    x = cases.noise(shape, torch.bfloat16)

    def call_with_less(name: str, *arguments: object) -> Any:
        return call(name, *arguments, _GRID_LIMIT=2)

    check_both(call_with_less, x, cases.mx("mxfp8", "floor"), axis)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_amax_is_over_finite_elements(call: Call, dtype: torch.dtype) -> None:
    for x in (
        cases.noise((9001,), dtype),
        cases.noise((3, 1367), dtype) * 2.0**-120,
        torch.full((5,), -0.0, dtype=dtype),
        torch.tensor([torch.nan, -torch.inf], dtype=dtype),
        torch.empty(0, 3, dtype=dtype),
        -every_value(dtype) if dtype != torch.float32 else cases.hard_float32(64),
    ):
        amax = call("finite_amax", x)
        assert amax.dtype == torch.float32
        assert amax.shape == ()
        finite = x[x.isfinite()].float().abs()
        assert_same(amax, finite.amax() if finite.numel() else torch.tensor(0.0))
