"""The image of a source is what quantisation makes of it, bit for bit, by arithmetic that shares none of its faults."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantexp.config.compose import compose
from quantexp.extras.verify.draws import random_integers as drawn_by_gold
from quantexp.extras.verify.exact import to_dtype
from quantexp.extras.verify.gold import gold_of, quantised
from quantexp.folders import conf_dir
from quantexp.formats import (
    FORMATS,
    Hadamard,
    QuantSpec,
    Rounding,
    ScaleRule,
    Scaling,
    finite_amax,
    get_format,
    hadamard,
    quantise,
    random_signs,
    resolve,
)
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.types import Family
from quantexp.proof.arithmetic import philox, tables
from quantexp.proof.image import image, num_differing, own_amax, random_integers
from quantexp.quant.multiply import quantise_operand
from quantexp.quant.precision import declared_maps
from quantexp.quant.sites import dim_of
from quantexp.quant.step_state import StepState, use_step_state
from tests.formats.tensors import assert_same, every_value
from tests.shipped import words_of

from .image_cases import (
    DEFINITIONS,
    DTYPES,
    SHAPES,
    assert_is_image,
    formats,
    normal,
    options_of,
    specs_of,
    with_special_values,
)

STREAM = "layer 0 fc1 linear.wgrad.g"


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
    experiment = compose([*words_of(scheme), "model.num_layers=4"], None, {})
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
