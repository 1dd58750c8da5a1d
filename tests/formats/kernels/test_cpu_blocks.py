"""Blocks of any shape and scale, random rounding and transforms by the compiled kernel, against the torch code.

`quantexp verify` and `tests/formats` compare the torch code with exact arithmetic and outside implementations.
"""

from __future__ import annotations

import itertools
import math
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.formats import (
    Format,
    Place,
    Transform,
    quantise,
    quantise_both,
    quantise_transformed,
    random_signs,
    resolve,
)
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.definitions.files import declared_by_name
from quantexp.formats.kernels import cpu, torch_alone
from quantexp.formats.spec import QuantSpec

from .builds import DTYPES, assert_same_bits, every_build, seeded, wild
from .test_cpu import all_patterns

CPU = torch.device("cpu")
SHIPPED = [
    "fp4_ue5m3",
    "fp8_128x128",
    "fp8_128x128_pow2",
    "fp8_1x128",
    "fp8_1x128_pow2",
    "int4_g128",
    "mxint8",
    "nvfp4_16x16",
]
#: Elements, blocks and scales that no shipped format has; each rule of each kind of scale is one of them.
DECLARED: dict[str, dict[str, Any]] = {
    "floor of a float": {"element": "e2m1", "block": 16, "scale": "e4m3", "scale_rule": "floor"},
    "ceil of a float": {"element": "e3m2", "block": 8, "scale": "ue5m3", "scale_rule": "ceil"},
    "ceil under a tensor": {
        "element": "e2m1",
        "block": [4, 24],
        "scale": "e4m3",
        "scale_rule": "ceil",
        "tensor_scale": "power_of_two",
    },
    "floor of bf16": {"element": "int8", "block": 24, "scale": "bf16", "scale_rule": "floor"},
    "ceil of bf16": {"element": "int3", "block": 5, "scale": "bf16", "scale_rule": "ceil"},
    "nearest bf16, lopsided": {
        "element": {"integer_bits": 5, "symmetric": False},
        "block": 512,
        "scale": "bf16",
    },
    "no negative zero": {
        "element": {"exponent_bits": 4, "mantissa_bits": 3, "nan": True, "negative_zero": False},
        "block": 40,
        "scale": "fp32",
    },
    "powers, lopsided": {
        "element": {"integer_bits": 4, "symmetric": False},
        "block": [2, 32],
        "scale": "e8m0",
        "scale_rule": "rceil",
    },
    "powers beyond float32": {"element": "int2", "block": 32, "scale": "e8m0"},
    "one element of many rows": {"element": "e4m3", "block": [16, 1], "scale": "fp32"},
    "ten mantissa bits": {"element": "e5m10", "block": 48, "scale": "e8m0", "scale_rule": "ceil"},
    "whole tensor, lopsided": {
        "element": {"integer_bits": 8, "symmetric": False},
        "block": "tensor",
        "scale": "fp32",
    },
}
#: Roundings, with their random numbers.
DRAWS: list[tuple[str, dict[str, Any]]] = [
    ("even", {}),
    ("away", {}),
    ("stochastic", {"seed": 2**63 + 5, "offset": 2**40 + 3}),
]


@cache
def declared(name: str) -> Format:
    return declared_format(name, DECLARED[name]) if name in DECLARED else declared_by_name(name, {})


EVERY = ["mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp4", "nvfp4", "fp8_e4m3", "fp8_e5m2", "hifp8"]
EVERY_BLOCKED = [*EVERY[:5], *SHIPPED, *list(DECLARED)[:-1]]


def fmt_of(name: str) -> str | Format:
    return name if name in EVERY else declared(name)


def specs_of(name: str) -> list[tuple[QuantSpec, dict[str, Any]]]:
    """Each option that changes the arithmetic, with seed and offset."""
    fmt = fmt_of(name)
    of_family: list[dict[str, Any]] = [{}]
    options = resolve(fmt).fmt.options
    if "scale_rule" in options:
        of_family = [{"scale_rule": rule} for rule in ("floor", "rceil", "ceil", "even")]
    if "pre_scale" in options:
        of_family += [{**each, "pre_scale": 0.875} for each in of_family]
    if "saturate" in options:
        of_family += [{"saturate": False}]
    if "scaling" in options:
        of_family = [
            {**each, "scaling": scaling}
            for each in of_family
            for scaling in ("none", "current", "exact")
        ]
    return [
        (resolve(fmt, rounding=rounding, **each), draw)
        for (rounding, draw), each in itertools.product(DRAWS, of_family)
    ]


def is_read(x: Tensor) -> bool:
    """Without AVX2 the kernel has no float16."""
    compiled = cpu.functions()
    return compiled is not None and x.dtype in compiled.dtypes


#: A tensor, how it is quantised along which axis with which random numbers, and what torch makes of it.
Quantised = tuple[Tensor, QuantSpec, int, dict[str, Any], Tensor]


def by_torch(x: Tensor, spec: QuantSpec, axis: int, draw: dict[str, Any]) -> Quantised:
    with torch_alone():
        return x, spec, axis, draw, quantise(x, spec, axis=axis, **draw)


def assert_all_are_torchs(quantised: list[Quantised]) -> None:
    """Every third one in place."""
    for number, (x, spec, axis, draw, expected) in enumerate(quantised):
        assert cpu.claims(x, spec) or not is_read(x)
        out = x.clone() if number % 3 == 0 else None
        actual = quantise(x if out is None else out, spec, axis=axis, out=out, **draw)
        assert out is None or actual is out
        assert_same_bits(actual, expected)


# pytest runs the builds of a case one after another, so torch quantises it once for all of them.


@lru_cache(maxsize=1)
def every_value(name: str, dtype: torch.dtype) -> list[Quantised]:
    x = all_patterns(dtype)
    shuffled = x[torch.randperm(len(x), generator=seeded(3))]
    return [
        by_torch(values.view(shape), spec, axis, draw)
        for spec, draw in specs_of(name)
        for values in (x, shuffled)
        for shape, axis in (((-1, 256), 1), ((256, -1), 0))
    ]


@every_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*EVERY, *SHIPPED, *DECLARED])
def test_every_value_in_every_option_is_torchs(build: str, name: str, dtype: torch.dtype) -> None:
    """Among neighbours in magnitude, and shuffled, so that blocks have many amaxes; along memory and across it."""
    assert_all_are_torchs(every_value(name, dtype))


@lru_cache(maxsize=1)
def every_shape(name: str) -> list[Quantised]:
    fmt = fmt_of(name)
    shapes = [(7, 100), (130, 17), (64, 1), (1, 3000), (1000,), (600, 40), (1, 1), (33, 2100)]
    if resolve(fmt).fmt.across == 1:
        shapes += [(5, 33, 3), (3, 70, 300), (2, 2, 40, 8)]
    return [
        by_torch(wild(torch.bfloat16, *shape), resolve(fmt, rounding=rounding), axis, draw)
        for shape, (rounding, draw) in itertools.product(shapes, DRAWS)
        for axis in range(len(shape))
    ]


@every_build
@pytest.mark.parametrize("name", EVERY_BLOCKED)
def test_every_shape_and_axis_is_torchs(build: str, name: str) -> None:
    """Rows shorter than a block, short last blocks, extents of 1, many rows, and one dimension."""
    assert_all_are_torchs(every_shape(name))


@lru_cache(maxsize=1)
def transformed(
    dtype: torch.dtype, block: int
) -> list[tuple[Tensor, QuantSpec, Transform, int, dict[str, Any], Tensor]]:
    names = ["mxfp4", "nvfp4", "fp8_1x128", "int4_g128", "floor of bf16", "no negative zero"]
    result = []
    for shape, name in itertools.product([(150, 200), (3, 64, 130), (512, 64), (1, 77)], names):
        x = wild(dtype, *shape, spread=1.0)
        for axis, (rounding, draw) in itertools.product(range(len(shape)), DRAWS):
            spec = resolve(fmt_of(name), rounding=rounding)
            for left in (True, False):
                transform = Transform(block, random_signs(block, 7, 8, CPU) if left else None, left)
                with torch_alone():
                    expected = quantise_transformed(x, spec, transform, axis=axis, **draw)
                result.append((x, spec, transform, axis, draw, expected))
    return result


@every_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [2, 8, 16, 64, 256])
def test_every_transform_is_torchs(build: str, dtype: torch.dtype, block: int) -> None:
    """With random signs and without, as left operand and as right, in short last blocks, under each kind of scale."""
    for x, spec, transform, axis, draw, expected in transformed(dtype, block):
        fits = math.lcm(spec.block, block) <= 512 and is_read(x)
        assert cpu.claims(x, spec, transform) is fits
        assert_same_bits(quantise_transformed(x, spec, transform, axis=axis, **draw), expected)


@every_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_after_a_transform_is_torchs(build: str, dtype: torch.dtype) -> None:
    """Finite values, of which sums may overflow to Inf, and a NaN or an Inf in its block alone."""
    x = all_patterns(dtype).view(-1, 64)
    for spec, draw in (*specs_of("mxfp4"), *specs_of("nvfp4")):
        for transform in (Transform(64, random_signs(64, 1, 2, CPU)), Transform(16, None, False)):
            got = quantise_transformed(x, spec, transform, axis=1, **draw)
            with torch_alone():
                expected = quantise_transformed(x, spec, transform, axis=1, **draw)
            assert_same_bits(got, expected)


@every_build
@pytest.mark.parametrize("name", EVERY_BLOCKED)
def test_both_copies_are_those_of_two_calls(build: str, name: str) -> None:
    fmt = fmt_of(name)
    shapes = [(130, 200), (64, 24, 72), (3, 5000), (70, 1), (1, 70), (2, 35, 1)]
    for shape, axes in itertools.product(shapes, [(0, -1), (-1, 0)]):
        x = wild(torch.bfloat16, *shape)
        if resolve(fmt).fmt.across > 1 and x.ndim > 2:
            continue
        for rounding in ("even", "away"):
            spec = resolve(fmt, rounding=rounding)
            copies = quantise_both(x, spec, axes=axes)
            with torch_alone():
                for copy, axis in zip(copies, axes, strict=True):
                    assert_same_bits(copy, quantise(x, spec, axis=axis))


@every_build
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8_e4m3", "hifp8", "nvfp4_16x16"])
def test_a_part_takes_the_numbers_of_its_place(build: str, name: str) -> None:
    """Also where its rows begin between two counters, and for each axis of its blocks."""
    spec = resolve(fmt_of(name), rounding="stochastic")
    whole = (90, 1001)
    for start, shape in (((3, 5), (64, 600)), ((0, 998), (90, 3)), ((89, 0), (1, 1001))):
        x = wild(torch.bfloat16, *shape)
        place = Place(whole, start)
        for axis in (0, 1):
            got = quantise(x, spec, axis=axis, seed=5, offset=6, place=place)
            with torch_alone():
                expected = quantise(x, spec, axis=axis, seed=5, offset=6, place=place)
            assert_same_bits(got, expected)


@pytest.mark.parametrize("name", ["mxint8", "nvfp4", "fp8_128x128", "mxfp4"])
def test_two_threads_give_the_values_of_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = wild(torch.bfloat16, 1 << 12, 4096 + 64)
    for (spec, draw), axis in itertools.product(specs_of(name)[-1:], (0, 1)):
        one = quantise(x, spec, axis=axis, **draw)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "get_num_threads", lambda: 2)
            assert_same_bits(quantise(x, spec, axis=axis, **draw), one)


def test_what_the_kernel_cannot_do_is_left_to_torch() -> None:
    x = torch.ones(8, 64)
    for content in (
        {"element": {"values": [-1, 0, 1]}, "block": 32},
        {"element": "e2m1", "block": 16, "scale": "e4m3", "candidates": [6, 4]},
        {"element": "e2m1", "block": 32, "scale": "e8m0", "scale_rule": "search"},
        {"element": "hif8", "block": 32},
        {"element": "e4m3", "block": 600, "scale": "fp32"},
        {"element": "e4m3", "block": "row", "scale": "fp32"},
        {"element": {"exponent_bits": 8, "mantissa_bits": 7, "infinity": True}, "block": 32},
    ):
        assert not cpu.claims(x, resolve(declared_format("it", content))), content
    assert not cpu.claims(x.expand(2, 8, 64), resolve(declared("nvfp4_16x16")))
    assert not cpu.claims(x.t(), resolve("mxfp8", rounding="stochastic"))
    assert not cpu.claims(x, resolve("fp8_e4m3"), Transform(16))
