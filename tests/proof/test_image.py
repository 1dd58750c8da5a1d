"""The image of a source is what quantisation makes of it, bit for bit, by arithmetic that shares none of its faults."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import quantexp.formats
import quantexp.proof.arithmetic
from quantexp.config.compose import compose
from quantexp.extras.verify.draws import random_integers as drawn_by_gold
from quantexp.extras.verify.exact import to_dtype
from quantexp.extras.verify.gold import gold_of, quantised
from quantexp.folders import conf_dir
from quantexp.formats import (
    FORMATS,
    Format,
    Hadamard,
    QuantSpec,
    Rounding,
    ScaleRule,
    Scaling,
    finite_amax,
    get_format,
    hadamard,
    quantise,
    quantising,
    random_signs,
    resolve,
)
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.types import Family
from quantexp.proof import image as image_module
from quantexp.proof.arithmetic import philox, tables
from quantexp.proof.image import image, num_differing, own_amax, random_integers
from quantexp.quant.multiply import quantise_operand
from quantexp.quant.precision import declared_maps
from quantexp.quant.sites import dim_of
from quantexp.quant.step_state import StepState, use_step_state
from tests.formats.tensors import assert_same, every_value

#: Definitions with what no shipped format has.
DEFINITIONS: dict[str, dict[str, Any]] = {
    "odd blocks": {"element": "e3m3", "block": 24, "scale": "ue5m3"},
    "scales below": {"element": "e2m1", "block": 16, "scale": "ue5m3", "scale_rule": "floor"},
    "scales above": {"element": "e2m1", "block": 16, "scale": "bf16", "scale_rule": "ceil"},
    "rows": {"element": "e4m3", "block": "row", "scale": "fp32"},
    "small tiles": {
        "element": "e2m1",
        "block": [4, 8],
        "scale": "ue4m3",
        "tensor_scale": "power_of_two",
    },
    "search": {"element": "int4", "block": 32, "scale": "bf16", "scale_rule": "search"},
    "search powers": {"element": "e2m1", "block": 32, "scale": "e8m0", "scale_rule": "search"},
    "search tiles": {
        "element": {"values": [-1, 1]},
        "block": [3, 5],
        "scale": "fp32",
        "scale_rule": "search",
    },
    "candidates": {
        "element": "e2m1",
        "block": 16,
        "scale": "e4m3",
        "candidates": [6, 4],
        "tensor_scale": "fp32",
        "amax_target": 1536,
    },
    "candidates of tiles": {
        "element": "int4",
        "block": [4, 8],
        "scale": "fp32",
        "candidates": [7, 8.75],
        "choose": "max",
    },
    "mean error": {
        "element": "e2m1",
        "block": 16,
        "scale": "ue5m3",
        "scale_rule": "search",
        "choose": "mae",
    },
    "list": {"element": {"values": [-3, -1.5, -0.5, 0.25, 0.75, 2]}, "block": 16, "scale": "bf16"},
    "ternary": {"element": {"values": [-1, 0, 1]}},
    "positive list": {"element": {"values": [0.1, 0.3, 1]}, "block": 8, "scale": "fp32"},
    "hif8 blocks": {"element": "hif8", "block": 24, "scale": "fp32"},
    "hif8 exact": {"element": "hif8", "scale": "fp32", "amax_target": 224},
    "asymmetric": {
        "element": {"integer_bits": 8, "symmetric": False},
        "block": 16,
        "scale": "fp32",
    },
    "no negative zero": {
        "element": {
            "exponent_bits": 4,
            "mantissa_bits": 3,
            "bias": 8,
            "nan": True,
            "negative_zero": False,
        },
        "block": 16,
        "scale": "fp32",
    },
    "no mantissa": {"element": "e5m0", "block": 32, "scale_rule": "rceil"},
    "wide": {"element": {"exponent_bits": 7, "mantissa_bits": 3, "bias": 0}, "scale": "none"},
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((70,), (33, 65), (5, 3, 40), (1, 50), (50, 1), (2, 3, 4, 5), ())
STREAM = "layer 0 fc1 linear.wgrad.g"


@cache
def formats() -> dict[str, Format]:
    """Every format of the table and of the shipped declarations, and more."""
    shipped = sorted(file.stem for file in (conf_dir() / "format").glob("*.yaml"))
    return {
        **{name: fmt for name, fmt in FORMATS.items() if fmt.family is not Family.BF16},
        **{name: get_format(name) for name in shipped},
        **{name: declared_format(name, content) for name, content in DEFINITIONS.items()},
    }


def specs_of(fmt: Format) -> list[QuantSpec]:
    """Every combination of a format's options."""
    rules = ScaleRule if "scale_rule" in fmt.options else (None,)
    scalings = Scaling if "scaling" in fmt.options else (None,)
    saturates = (True, False) if "saturate" in fmt.options else (True,)
    pre_scales = (False, True, 16 / 17) if "pre_scale" in fmt.options else (False,)
    roundings = Rounding if "rounding" in fmt.options else (None,)
    specs = []
    for options in product(rules, scalings, saturates, pre_scales, roundings):
        names = ("scale_rule", "scaling", "saturate", "pre_scale", "rounding")
        chosen: dict[str, Any] = dict(zip(names, options, strict=True))
        specs.append(resolve(fmt, **chosen))
    return specs


def normal(shape: tuple[int, ...], seed: int, spread: int = 0) -> Tensor:
    """Normal numbers, times powers of two between 2^-spread and 2^spread."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp2(
        torch.randint(-spread, spread + 1, shape, generator=generator).to(x.dtype)
    )


def with_special_values(x: Tensor) -> Tensor:
    """x with zeros, subnormals, NaN, Inf and the largest values in some of its blocks."""
    info = torch.finfo(x.dtype)
    values = [0.0, -0.0, math.nan, math.inf, -math.inf, info.max, -info.max]
    values += [info.smallest_normal, info.smallest_normal / 4, -info.smallest_normal / 2]
    x = x.clone()
    flat = x.view(-1)
    for number, value in enumerate(values):
        flat[number * 97 % flat.numel()] = value
    if x.ndim > 1:
        x[-1] = 0.0
        x[-1, ..., -1] = -0.0
    return x


def options_of(spec: QuantSpec, x: Tensor) -> dict[str, Any]:
    """The arguments of `quantise` that a specification needs."""
    options: dict[str, Any] = {}
    if spec.rounding is Rounding.STOCHASTIC:
        options |= {"seed": 0xFEDC_BA98_7654_3210, "offset": (3 << 32) + 1}
    if spec.scaling is Scaling.DELAYED:
        options["amax"] = finite_amax(x) * 0.37
    return options


def assert_is_image(x: Tensor, spec: QuantSpec, axis: int, **options: Any) -> None:
    with contextlib.ExitStack() as stack:
        if spec.fmt.element.mantissa_bits > 7:
            # The compiled kernel truncates a largest value that bf16 does not have.
            stack.enter_context(patch.object(quantising, "kernel_for", lambda *_: None))
        expected = quantise(x, spec, axis=axis, **options)
    actual = image(x, spec, axis, **options)
    assert (actual.shape, actual.dtype) == (x.shape, x.dtype)
    assert_same(actual, expected)
    assert num_differing(expected, x, spec, axis, **options) == 0


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables for tensors of any size."""
    monkeypatch.setattr(tables, "_FEWEST", 2)
    monkeypatch.setattr(tables, "_FEWEST_OF_ENTRY", 2.0**-30)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("name", formats())
def test_it_is_what_quantisation_makes_of_the_source(name: str) -> None:
    for number, spec in enumerate(specs_of(formats()[name])):
        dtype, shape = DTYPES[number % 3], SHAPES[number % 7]
        axis = (-1, 0, len(shape) // 2)[number % 3]
        x = normal(shape, number, spread=30 if number % 2 else 2).to(dtype)
        assert_is_image(x, spec, axis, **options_of(spec, x))
        x = normal((33, 65), number).to(dtype)
        if is_sound_at_the_ends(spec):
            x = with_special_values(x)
        assert_is_image(x, spec, -1 - number % 2, **options_of(spec, x))


def is_sound_at_the_ends(spec: QuantSpec) -> bool:
    """Whether quantisation clamps scales to 2^-127 .. 2^127: see `test_extremes_follow_the_definition`."""
    is_mx = spec.fmt.family is Family.MX
    return not is_mx or spec.fmt.element.emax > 0 or spec.scale_rule is ScaleRule.FLOOR


@pytest.mark.slow
@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", formats())
def test_it_is_for_every_option_shape_and_axis(name: str, dtype: torch.dtype) -> None:
    for number, spec in enumerate(specs_of(formats()[name])):
        for shape in SHAPES:
            x = normal(shape, number, spread=30).to(dtype)
            for axis in range(-len(shape), len(shape)) if shape else (-1, 0):
                assert_is_image(x, spec, axis, **options_of(spec, x))


@pytest.mark.parametrize("block", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4_e2m1", "nvfp4_e2m1"])
def test_blocks_of_any_extent(name: str, block: int) -> None:
    x = normal((9, 300), block, spread=8).bfloat16()
    assert_is_image(x, resolve(name, block=block), -1)
    assert_is_image(x, resolve(name, block=block), 0)


@pytest.mark.parametrize("target", [1.0, 15.0, 100.3, 224.0])
@pytest.mark.parametrize("scaling", ["current", "exact"])
@pytest.mark.parametrize("name", ["hifp8", "fp8_e4m3", "fp8_e5m2"])
def test_targets_and_extreme_amaxes(name: str, scaling: str, target: float) -> None:
    spec = resolve(name, scaling=scaling, amax_target=target)
    x = normal((4, 100), 5, spread=40)
    for amax in (0.0, 1e-44, 2.0**-126, 3.7e-20, 1.0, 1e30, 3.4e38, math.inf, math.nan):
        assert_is_image(x, spec, -1, amax=torch.tensor(amax))
    assert_is_image(torch.zeros(3, 5), spec, -1)
    assert_is_image(torch.full((3, 5), math.nan), spec, -1)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1", "nvfp4_e2m1"])
def test_every_code_alone_and_among_others(name: str) -> None:
    codes = every_value(torch.bfloat16)
    for spec in specs_of(FORMATS[name]):
        if spec.rounding is not Rounding.STOCHASTIC and spec.scaling is not Scaling.DELAYED:
            assert_is_image(codes.view(-1, 1), spec, -1)
            assert_is_image(codes.view(256, 256), spec, 0)
            assert_is_image(codes.view(256, 256), spec, 1)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "hifp8"])
def test_every_code_under_a_scale_of_the_tensor(name: str) -> None:
    codes = every_value(torch.bfloat16)
    for spec in specs_of(FORMATS[name]):
        for amax in (1.0, 0.3, 2.0**-100, 1e20):
            options = options_of(spec, codes)
            if spec.is_scaled:
                options["amax"] = torch.tensor(amax)
            assert_is_image(codes, spec, 0, **options)


@pytest.mark.parametrize("name", formats())
def test_strides_do_not_matter(name: str) -> None:
    base = normal((40, 66, 3), 7).bfloat16()
    for spec in specs_of(formats()[name])[-3:]:
        for x in (base.permute(2, 0, 1), base[::2, 1::3], base[:, :1].expand(-1, 66, -1)):
            options = options_of(spec, x)
            assert_same(image(x, spec, 1, **options), image(x.contiguous(), spec, 1, **options))
            assert_is_image(x, spec, 1, **options)


@pytest.mark.parametrize("name", formats())
def test_the_image_of_a_part_is_the_part_of_the_image(name: str) -> None:
    fmt = formats()[name]
    along, rows = fmt.block or 1, fmt.across * 2
    is_row = along > 1 << 10
    shape = (2 * rows + 3, 50 if is_row else 3 * along + 5)
    x = normal(shape, 8, spread=3).bfloat16()
    positions = torch.arange(x.numel()).view(shape)
    for spec in specs_of(fmt):
        options = options_of(spec, x)
        whole = image(x, spec, -1, **options)
        options["amax"] = options.get("amax", own_amax(x, spec, -1))
        stop = None if is_row else 2 * along
        for part in (slice(rows, None), slice(None)), (slice(rows, 2 * rows), slice(0, stop)):
            one = image(x[part], spec, -1, positions=positions[part], **options)
            assert_same(one, whole[part])


@pytest.mark.parametrize("kind", [Hadamard.DETERMINISTIC, Hadamard.RANDOM])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("block", [2, 16, 32, 128])
def test_the_transform_has_the_bits_of_its_definition(
    block: int, left: bool, kind: Hadamard
) -> None:
    signs = random_signs(block, 5, 6, torch.device("cpu")) if kind is Hadamard.RANDOM else None
    spec = replace(
        resolve("mxfp4", rounding="stochastic", pre_scale=True),
        hadamard=kind,
        hadamard_block=block,
        left=left,
    )
    draw: dict[str, Any] = {"seed": 1, "offset": 2}
    for number, (dtype, axis) in enumerate(product(DTYPES, (0, 1, -1))):
        x = normal((5 * block // 2 + 7, 3, 70), number, spread=9).to(dtype)
        v = hadamard(x, axis=axis, block=block, signs=signs, left=left)
        expected = quantise(v, spec, axis=axis, **draw).to(dtype)
        assert_same(image(x, spec, axis, signs=signs, **draw), expected)
        assert float(own_amax(x, spec, axis, signs)) == float(finite_amax(v))


def test_the_transform_of_large_and_special_values() -> None:
    spec = replace(resolve("hifp8", scaling="exact"), hadamard=Hadamard.DETERMINISTIC)
    spec = replace(spec, hadamard_block=16)
    x = with_special_values(normal((40, 50), 1, spread=100))
    for axis in (0, 1):
        expected = quantise(hadamard(x, axis=axis, block=16), spec, axis=axis)
        assert_same(image(x, spec, axis), expected)


#: Schemes of `quant/more` whose slots differ most from those of others.
DISTINCT = {
    *("linear_fp8", "linear_hifp8_delayed", "linear_mxfp4_sr_rht", "linear_nvfp4_recipe"),
    *("FA_full_mxfp6", "linear_fp8_block", "linear_int4_weights", "linear_fp4_ue5m3"),
}


def schemes() -> list[Any]:
    folder = conf_dir() / "quant"
    names = []
    for file in sorted([*folder.glob("*.yaml"), *(folder / "more").glob("*.yaml")]):
        is_distinct = file.parent == folder or file.stem in DISTINCT
        name = str(file.relative_to(folder).with_suffix(""))
        names.append(pytest.param(name, marks=() if is_distinct else pytest.mark.slow))
    return names


@pytest.mark.parametrize("scheme", schemes())
def test_every_slot_of_every_scheme(scheme: str) -> None:
    experiment = compose([f"quant={scheme}", "model.num_layers=4"], None, {})
    distinct: dict[tuple[object, ...], tuple[QuantSpec, int]] = {}
    for precision in declared_maps(experiment.model, experiment.quant):
        for module in precision.values():
            for entry in module.entries():
                spec, dim = entry.spec, dim_of(entry.slot.operand, entry.spec)
                distinct.setdefault((replace(spec, stream=""), spec.left, dim), (spec, dim))
    assert distinct
    for spec, dim in distinct.values():
        assert_operand_is_image(spec, dim)


def assert_operand_is_image(spec: QuantSpec, axis: int) -> None:
    """In two iterations, of which the second has an amax history."""
    with use_step_state(StepState(seed=7, micro_batch=3)) as state:
        for iteration in (1, 2):
            state.begin(iteration, 3)
            x = normal((37, 2, 70), iteration).bfloat16()
            options: dict[str, Any] = dict(state.draw(spec))
            options["signs"] = state.signs(spec, x.device)
            options["amax"] = state.amax(spec) if spec.scaling is Scaling.DELAYED else None
            operand = quantise_operand(x, spec, axis)
            assert_same(image(x, spec, axis, **options), operand)
            assert num_differing(operand, x, spec, axis, **options) == 0
            state.finish()


def test_a_class_is_called_as_quantisation_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "formats_with_images.py").write_text(
        "import torch\n"
        "class Noisy:\n"
        "    def quantise(self, x, *, axis, generator):\n"
        "        noise = torch.rand(x.shape, generator=generator)\n"
        "        return ((x.float() + noise) * (axis + 2)).to(x.dtype)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = replace(resolve(get_format("formats_with_images:Noisy")), stream=STREAM)
    assert_operand_is_image(spec, -1)
    transformed = replace(spec, hadamard=Hadamard.RANDOM, hadamard_block=32)
    assert_operand_is_image(transformed, 0)


def test_working_precision_and_empty_tensors_are_their_own_images() -> None:
    x = normal((4, 8), 1).bfloat16()
    assert image(x, resolve("bf16"), -1) is x
    assert num_differing(x.clone(), x, resolve("bf16"), -1) == 0
    assert num_differing(-x, x, resolve("bf16"), -1) == 32
    empty = x[:0]
    for name in ("mxfp8", "nvfp4", "hifp8", "fp8_128x128"):
        assert image(empty, resolve(name), -1) is empty
        assert num_differing(empty, empty, resolve(name), -1) == 0


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


def test_without_a_compiler_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_functions", lambda: None)
    monkeypatch.setattr(philox, "_compiled", lambda: None)
    x = normal((256, 512), 4).bfloat16()
    for spec in (resolve("mxfp8"), resolve("mxfp4", rounding="stochastic")):
        assert_is_image(x, spec, 0, **options_of(spec, x))


@pytest.mark.parametrize("is_compiled", [True, False])
def test_random_integers_are_philox(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr(philox, "_compiled", lambda: None)
    # The known answers of Random123: counter and key of all zeros, and of all ones.
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert random_integers(torch.arange(4), 0, 0).tolist() == [word >> 8 for word in words]
    for seed, offset in ((0, 0), ((1 << 64) - 1, (1 << 64) - 1), (0x0123_4567_89AB_CDEF, 5 << 40)):
        gold = torch.from_numpy(drawn_by_gold(5001, seed, offset))
        order = torch.randperm(5001, generator=torch.Generator().manual_seed(0)).view(3, -1)
        for positions in (order, order.view(-1)[::3], order[:1].expand(4, -1)):
            numbers = random_integers(positions, seed, offset)
            assert torch.equal(numbers.long(), gold[positions])
    far = torch.tensor([(1 << 40) + 3, (1 << 62) + 1])
    state = torch.get_rng_state()
    assert random_integers(far, 3, 4).tolist() == _far_numbers()
    assert torch.equal(torch.get_rng_state(), state)


def _far_numbers() -> list[int]:
    from quantexp.extras.verify.draws import random_integer

    return [random_integer(at, 3, 4) for at in ((1 << 40) + 3, (1 << 62) + 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_own_amax_is_the_largest_finite_magnitude(dtype: torch.dtype) -> None:
    spec = resolve("mxfp8")
    x = with_special_values(normal((33, 65), 6, spread=9).to(dtype))
    for part in (x, x.t(), x[::2, ::3], x[0, 0], x[:1].expand(9, -1), x[-1:], x.abs().neg()):
        amax = own_amax(part, spec, -1)
        assert (amax.shape, amax.dtype) == ((), torch.float32)
        assert float(amax) == float(finite_amax(part))
    assert own_amax(torch.full((3,), math.nan, dtype=dtype), spec, -1) == 0


def test_subnormal_numbers_are_never_flushed() -> None:
    x = (normal((8, 64), 9) * 2.0**-130).float()
    expected = [image(x, resolve(name), -1) for name in ("mxfp8", "hifp8", "fp8_e4m3")]
    torch.set_flush_denormal(True)
    try:
        actual = [image(x, resolve(name), -1) for name in ("mxfp8", "hifp8", "fp8_e4m3")]
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b)
    assert expected[0].any()


@pytest.mark.parametrize(
    ("definition", "rounding", "values"),
    [
        # Scales below the smallest and above the largest power of two, of elements whose emax is 0 or below.
        ({"element": {"integer_bits": 8, "step": 2.0**-6}, "block": 2}, "even", [2.0**-130] * 2),
        ({"element": {"integer_bits": 8, "step": 2.0**-6}, "block": 2}, "away", [3.2e38, 1e38]),
        ({"element": {"integer_bits": 4, "step": 2.0**-10}, "block": 2}, "even", [1e37, 1e36]),
        # Just below half the smallest value, which x + 1/2 rounds up in float32.
        (DEFINITIONS["wide"], "away", [0.125 * (1 - 2.0**-24), 1.0]),
    ],
)
@pytest.mark.parametrize("rule", ["floor", "rceil", "ceil", "even"])
def test_extremes_follow_the_definition(
    definition: dict[str, Any], rounding: str, values: list[float], rule: str
) -> None:
    definition = definition | ({"scale_rule": rule} if "block" in definition else {})
    spec = resolve(declared_format("extreme", definition), rounding=rounding)
    x = torch.tensor([values], dtype=torch.float32)
    expected = quantised(gold_of(definition), x.numpy(), rounding)
    assert_same(image(x, spec, -1), expected)


def test_saturation_is_rounded_to_the_dtype() -> None:
    definition = json.loads(get_format("fp16_scaled").definition) | {"scale": "none"}
    x = torch.tensor([1e6, -1e6, 3.0], dtype=torch.bfloat16)
    expected = quantised(gold_of(definition), x.float().numpy()[None], "even")
    spec = resolve("fp16_scaled", scaling="none")
    assert_same(image(x, spec, -1), to_dtype(np.asarray(expected[0]), "bfloat16"))


#: What describes formats.
SHARED = {
    "quantexp.formats.definitions.python",
    "quantexp.formats.spec",
    "quantexp.formats.table",
    "quantexp.formats.types",
}


#: The processor's mode: functions of `quantexp.formats.kernels`.
MODE = {
    "exact",
    "exact_in_pool",
    "is_flushing",
    "_exact_pool",
    "_refuse_flushing_pool",
    "_use_one_thread",
}


def modules_of_the_image() -> list[Path]:
    folder = Path(quantexp.proof.arithmetic.__file__).parent
    return [Path(image_module.__file__), *sorted(folder.glob("*.py"))]


@pytest.mark.parametrize("file", modules_of_the_image(), ids=lambda file: file.name)
def test_it_imports_no_arithmetic_of_formats(file: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "names")]
    for node in imports:
        name = getattr(node, "module", None) or node.names[0].name
        if name.startswith("quantexp."):
            others = ("quantexp.proof.arithmetic", "quantexp.compiled")
            is_mode = name == "quantexp.formats.kernels" and {a.name for a in node.names} <= MODE
            assert is_mode or name in SHARED or name.startswith(others), name


def planted_everywhere() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Every function of `quantexp.formats` and `quantexp.quant` that may compute, wherever it is imported."""
    for package in ("quantexp.formats", "quantexp.quant"):
        names = [package]
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
            if "verify" not in info.name and "triton" not in info.name:
                names.append(info.name)
        for name in names:
            module = importlib.import_module(name)
            for attribute, value in list(vars(module).items()):
                home = getattr(value, "__module__", "")
                is_ours = home.startswith(("quantexp.formats.", "quantexp.quant."))
                is_mode = home == "quantexp.formats.kernels" and attribute in MODE
                if inspect.isfunction(value) and is_ours and not is_mode and not _is_shared(home):
                    yield module, attribute, value


def _is_shared(module: str) -> bool:
    return module in SHARED or module.startswith("quantexp.formats.definitions")


def test_a_fault_in_any_function_that_quantises_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = normal((33, 150), 11).bfloat16()
    cases: list[tuple[QuantSpec, dict[str, Any]]] = []
    for fmt in formats().values():
        specs = specs_of(fmt)
        for plain in specs[:: max(1, len(specs) // 3)]:
            options = options_of(plain, x)
            changed = replace(plain, hadamard=Hadamard.DETERMINISTIC, hadamard_block=16)
            cases += [(plain, options), (changed, options)]
    before = [image(x, spec, -1, **options) for spec, options in cases]

    def planted(*_: object, **__: object) -> Any:
        raise AssertionError("arithmetic of the code that quantises")

    num_planted = 0
    for module, attribute, _ in planted_everywhere():
        monkeypatch.setattr(module, attribute, planted)
        num_planted += 1
    assert num_planted > 300
    with pytest.raises(AssertionError, match="arithmetic of the code"):
        quantising.quantise(x, cases[0][0])
    for (spec, options), expected in zip(cases, before, strict=True):
        assert_same(image(x, spec, -1, **options), expected)
        assert num_differing(expected, x, spec, -1, **options) == 0
        own_amax(x, spec, -1)


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
