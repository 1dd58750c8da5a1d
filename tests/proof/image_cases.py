"""Formats with every option, tensors with special values, and the comparison of an image with quantisation."""

from __future__ import annotations

import contextlib
import math
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from quantexp.folders import conf_dir
from quantexp.formats import (
    FORMATS,
    Format,
    QuantSpec,
    Rounding,
    ScaleRule,
    Scaling,
    finite_amax,
    get_format,
    quantise,
    quantising,
    resolve,
)
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.types import Family
from quantexp.proof.image import image, num_differing
from tests.formats.tensors import assert_same

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
    "elements": {
        "element": ["int4", "e2m1", "e1m2"],
        "block": 24,
        "scale": "bf16",
        "choose": "mae",
    },
    "elements of tiles": {"element": ["e2m1", "hif8"], "block": [3, 5], "scale": "fp32"},
    "elements of powers": {"element": ["e2m1", {"values": [-2, -1, 0, 1, 2]}], "block": 32},
    "micro-exponents": {"element": "e2m1", "block": 24, "micro_exponents": [12, 4, 2]},
    "corrected": {
        "element": ["e2m1", "int4"],
        "block": 8,
        "scale": "ue5m3",
        "candidates": [5, 6],
        "eden": 24,
    },
    "rows of blocks": {
        "element": ["e2m1", "int4"],
        "block": 8,
        "scale": "ue4m3",
        "tensor_scale": "power_of_two",
        "macro_block": "row",
    },
    "macro blocks": {
        "element": "e2m1",
        "block": 4,
        "micro_exponents": [2],
        "tensor_scale": "fp32",
        "macro_block": 12,
    },
    "macro blocks, corrected": {
        "element": "e2m1",
        "block": 4,
        "scale": "e4m3",
        "eden": 8,
        "tensor_scale": "fp32",
        "macro_block": 24,
        "amax_target": 999,
    },
    "corrected exactly": {"element": "e4m3", "block": 5, "scale": "fp32", "eden": 15},
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
        if chosen["rounding"] is Rounding.ZERO and not chosen["saturate"]:
            continue
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
