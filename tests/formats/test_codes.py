"""Every code has the value that its specification and other implementations give it."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch

from quantexp.extras.verify.grids import HIF8_TABLE
from quantexp.extras.verify.oracles import en_dtypes_oracle, gfloat_oracle, ml_dtypes_oracle
from quantexp.extras.verify.rational import MX_ELEMENTS, hif8_magnitudes, mx_magnitudes
from quantexp.formats import FORMATS, decode
from quantexp.formats.codes import code_values

from .tensors import assert_same


def hif8_value(code: int) -> float:
    """A HiFloat8 code from its written form, as a string of bits read from the left."""
    if code in (0x6F, 0xEF):
        return math.inf if code == 0x6F else -math.inf
    if code == 0x80:
        return math.nan
    sign, bits = -1 if code >> 7 else 1, f"{code & 0x7F:07b}"
    if bits.startswith("0000"):
        return sign * 2.0 ** (int(bits, 2) - 23) if code else 0.0
    dot, width = next(
        (dot, width)
        for dot, width in {"11": 4, "10": 3, "01": 2, "001": 1, "0001": 0}.items()
        if bits.startswith(dot)
    )
    field, mantissa = bits[len(dot) : len(dot) + width], bits[len(dot) + width :]
    exponent = int("1" + field[1:], 2) * (-1 if field[0] == "1" else 1) if field else 0
    return sign * 2.0**exponent * (1 + int(mantissa, 2) / 2 ** len(mantissa))


def test_the_256_codes_of_hif8_follow_the_papers_rules() -> None:
    assert_same(
        np.array(code_values(FORMATS["hifp8"].element)),
        np.array([hif8_value(c) for c in range(256)]),
    )


def test_the_256_codes_of_hif8_are_those_of_the_stored_table() -> None:
    with HIF8_TABLE.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["code"], 16) for row in rows] == list(range(256))
    assert_same(
        np.array(code_values(FORMATS["hifp8"].element)),
        np.array([float(row["value"]) for row in rows]),
    )


def test_the_256_codes_of_hif8_are_those_of_en_dtypes() -> None:
    theirs = en_dtypes_oracle.code_values("hif8")
    assert theirs is not None
    assert_same(np.array(code_values(FORMATS["hifp8"].element)), theirs)


def test_the_positive_codes_of_hif8_are_all_its_magnitudes() -> None:
    positive = sorted(v for v in code_values(FORMATS["hifp8"].element)[:128] if math.isfinite(v))
    assert positive == [float(magnitude) for magnitude in hif8_magnitudes()]


@pytest.mark.parametrize("name", MX_ELEMENTS)
def test_every_mx_code_has_the_value_that_ml_dtypes_and_gfloat_give_it(name: str) -> None:
    element = FORMATS[name].element
    ours = np.array(code_values(element))
    for theirs in (ml_dtypes_oracle, gfloat_oracle):
        assert_same(ours, theirs.code_values(element.name))
    finite = ours[: element.sign_bit][np.isfinite(ours[: element.sign_bit])]
    assert finite.tolist() == [float(magnitude) for magnitude in mx_magnitudes(name)]


@pytest.mark.parametrize("name", MX_ELEMENTS)
def test_every_code_at_every_scale_is_their_product(name: str) -> None:
    """float64 represents all products; the only rounding is that of float32's overflow."""
    element = FORMATS[name].element
    num_codes = 1 << element.bits
    codes = torch.arange(num_codes, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256).to(torch.uint8)[:, None].repeat(1, num_codes)
    with np.errstate(over="ignore"):
        powers = np.exp2(np.arange(256.0) - 127)[:, None]
        expected = (np.array(code_values(element))[None] * powers).astype(np.float32)
    expected[255] = np.nan
    assert_same(decode(codes, scales, name, block=1), expected)
