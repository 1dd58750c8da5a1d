"""The compiled GPU kernels on a CUDA device: bit-identical to the torch code on the CPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantexp.formats import Place, Transform, quantise, quantise_both
from quantexp.formats.families import tensor_scale
from quantexp.formats.kernels import gpu, gpu_panels, kernel_for, torch_alone
from quantexp.formats.layout import Draw
from quantexp.formats.spec import QuantSpec, resolve

from ..tensors import assert_same, every_value  # noqa: TID252
from . import gpu_cases as cases
from . import panel_cases as panels
from .builds import wild
from .gpu_cases import check, check_both, reference

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def _usable() -> None:
    assert gpu.obstacle(torch.device("cuda", torch.cuda.current_device())) is None


def call(name: str, *arguments: object) -> Any:
    """Call a function of the module with its tensor arguments on the device."""
    there = [one.cuda() if isinstance(one, torch.Tensor) else one for one in arguments]
    result = getattr(gpu, name)(*there)
    if result is not None:
        return result.cpu()
    return tuple(one.cpu() if isinstance(one, torch.Tensor) else one for one in there)


def call_panels(name: str, *arguments: object) -> Any:
    """The same of the module of the kernel for all other formats."""
    there = [one.cuda() if isinstance(one, torch.Tensor) else one for one in arguments]
    if isinstance(there[-1], Transform) and there[-1].signs is not None:
        there[-1] = replace(there[-1], signs=there[-1].signs.cuda())
    getattr(gpu_panels, name)(*there)
    return tuple(one.cpu() if isinstance(one, torch.Tensor) else one for one in there)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("name", panels.NAMES)
def test_every_value_in_every_option_of_every_format(name: str, dtype: torch.dtype) -> None:
    x = cases.hard_float32(1024) if dtype == torch.float32 else every_value(dtype)
    for spec, draw in panels.cases_of(name):
        for shape, axis in (((-1, 256), 1), ((256, -1), 0)):
            panels.check(call_panels, x.view(shape), spec, axis, draw)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("name", panels.NAMES)
def test_every_shape_place_transform_and_both_copies(name: str, dtype: torch.dtype) -> None:
    options = panels.cases_of(name)
    for shape in (*panels.SHAPES, (600, 700)):
        x = wild(dtype, *shape)
        for (spec, draw), axis in itertools.product(options[-1:], range(len(shape) or 1)):
            if panels.has_axis(x, spec):
                panels.check(call_panels, x, spec, axis, draw)
    spec, draw = options[-1]
    panels.check(call_panels, wild(dtype, 64, 60), spec, 1, draw, Place((90, 1001), (3, 5)))
    if name in panels.BOTH:
        for shape, axis in [((130, 200), 0), ((64, 24, 72), 0), ((2, 37, 3, 45), 1)]:
            panels.check_both(call_panels, wild(dtype, *shape), options[0][0], axis)
        for x, axis, transform in panels.transforms(dtype):
            panels.check(call_panels, x, spec, axis, draw, transform=transform)


@pytest.mark.parametrize("rounding", ["even", "away"])
@pytest.mark.parametrize("rule", cases.RULES)
@pytest.mark.parametrize("fmt", cases.MX)
def test_every_16_bit_value_in_either_direction(fmt: str, rule: str, rounding: str) -> None:
    options = cases.mx(fmt, rule, rounding)
    for dtype in (torch.bfloat16, torch.float16):
        for x in (cases.spread(dtype), cases.mixed(dtype), every_value(dtype).view(64, 1024)):
            check_both(call, x, options)
            check(call, x, options, 0)
            check(call, x, options, 1)


@pytest.mark.parametrize("rounding", ["even", "away"])
@pytest.mark.parametrize("rule", cases.RULES)
@pytest.mark.parametrize("fmt", cases.MX)
def test_much_float32_under_every_rule(fmt: str, rule: str, rounding: str) -> None:
    options = cases.mx(fmt, rule, rounding)
    x = cases.much_float32()
    check_both(call, x, options)
    check(call, x, options, 0)
    check(call, x, options, 1)


@pytest.mark.parametrize("options", cases.HIF8, ids=cases.words)
def test_every_16_bit_value_and_hard_float32_become_hifloat8(options: QuantSpec) -> None:
    scaled = options.scaling.value != "none"
    amaxes = [None, *map(torch.tensor, (3.0, 2.0**-30, 2.0**-133, 3e38))] if scaled else [None]
    for x in (
        every_value(torch.bfloat16),
        every_value(torch.float16),
        cases.hard_float32(2048),
        cases.noise((3, 1367), torch.bfloat16),
    ):
        for amax in amaxes:
            check(call, x, options, x.ndim - 1, amax)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_shape(dtype: torch.dtype) -> None:
    for shape, axis in cases.SHAPES:
        check(call, cases.noise(shape, dtype), cases.mx("mxfp8", "rceil", "away"), axis)
    for shape, axis in cases.BOTH_SHAPES:
        check_both(call, cases.noise(shape, dtype), cases.mx("mxfp4", "floor"), axis)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_amax_is_over_finite_elements(dtype: torch.dtype) -> None:
    for x in (
        cases.noise((9001,), dtype),
        cases.noise((1 << 20,), dtype),
        torch.empty(0).to(dtype),
    ):
        finite = x[x.isfinite()].float().abs()
        assert_same(call("finite_amax", x), finite.amax() if finite.numel() else torch.tensor(0.0))


def test_the_kernels_claim_tensors_of_the_device_and_no_others() -> None:
    x = torch.zeros(32)
    assert gpu.claims(x.cuda(), resolve("mxfp8"))
    assert gpu.reads(x.cuda())
    assert gpu.claims_both(x.cuda(), resolve("mxfp8"))
    assert not gpu.claims(x, resolve("mxfp8"))


def test_nothing_waits_for_the_device() -> None:
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    options = resolve("hifp8", scaling="current")
    scale = tensor_scale(x, options, None)
    y, z = torch.empty_like(x), torch.empty_like(x)
    drawn, transform = resolve("nvfp4", rounding="stochastic"), Transform(16)
    gpu.quantise(x, y, options, 1, scale)  # compiled now, if it was not
    gpu.quantise(x, y, drawn, 1, scale, Draw(1, 2), transform)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gpu.quantise(x, y, options, 1, scale)
        gpu.quantise(x, y, resolve("mxfp8"), 1, None)
        gpu.quantise_both(x, y, z, resolve("mxfp8"), 0)
        gpu.quantise(x, y, drawn, 1, scale, Draw(1, 2), transform)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_elements_than_32_bits_count() -> None:
    rows = (1 << 31) // 64 + 32
    if torch.cuda.mem_get_info()[0] < 6 * rows * 64 * 2:
        pytest.skip("the device's memory is too small")
    x = torch.zeros(rows, 64, device="cuda", dtype=torch.bfloat16)
    x[-32:] = cases.noise((32, 64), torch.bfloat16).cuda()
    columns, rows_ = torch.empty_like(x), torch.empty_like(x)
    options = resolve("mxfp8")
    gpu.quantise_both(x, columns, rows_, options, 0)
    for axis, both in ((0, columns), (1, rows_)):
        alone = torch.empty_like(x)
        gpu.quantise(x, alone, options, axis, None)
        expected = reference(x[-32:].cpu(), options, axis)
        assert_same(alone[-32:].cpu(), expected)
        assert_same(both[-32:].cpu(), expected)
        assert int(torch.count_nonzero(both[:-32])) == 0


def test_the_functions_of_a_run_use_the_kernels() -> None:
    x = cases.noise((70, 96), torch.bfloat16)
    there = x.cuda()
    assert kernel_for(there, resolve("mxfp8")) is gpu
    both_formats: tuple[tuple[str, dict[str, Any]], ...] = (
        ("mxfp8", {"scale_rule": "rceil"}),
        ("hifp8", {"scaling": "current"}),
        ("nvfp4", {}),
        ("fp8_e4m3", {}),
    )
    for fmt, options in both_formats:
        with torch_alone():
            expected = [quantise(x, fmt, axis=axis, **options) for axis in (0, 1)]
        assert_same(quantise(there, fmt, axis=0, **options).cpu(), expected[0])
        assert_same(quantise(there.t(), fmt, axis=0, **options).t().cpu(), expected[1])
        both = quantise_both(there, resolve(fmt, **options), axes=(1, 0))
        assert_same(both[0].cpu(), expected[1])
        assert_same(both[1].cpu(), expected[0])
