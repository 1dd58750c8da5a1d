"""Elements have the values of their definitions, those of other libraries, and nonsense is refused."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quantexp.formats.codes import code_values
from quantexp.formats.definitions.elements import element_of, scale_element_of
from quantexp.formats.table import E4M3, HIF8


def finite(content: object) -> list[float]:
    values = {value for value in code_values(element_of(content)) if math.isfinite(value)}
    return sorted(values)


def of_library(dtype: Any, bits: int) -> list[float]:
    codes = np.arange(1 << bits, dtype=np.uint8).view(dtype).astype(np.float64)
    return sorted(set(codes[np.isfinite(codes)].tolist()))


@pytest.mark.parametrize(
    ("content", "dtype", "bits"),
    [
        ("e4m3", ml_dtypes.float8_e4m3fn, 8),
        ("e5m2", ml_dtypes.float8_e5m2, 8),
        ("e2m3", ml_dtypes.float6_e2m3fn, 6),
        ("e3m2", ml_dtypes.float6_e3m2fn, 6),
        ("e2m1", ml_dtypes.float4_e2m1fn, 4),
        ({"exponent_bits": 4, "mantissa_bits": 3, "infinity": True}, ml_dtypes.float8_e4m3, 8),
        ({"exponent_bits": 3, "mantissa_bits": 4, "infinity": True}, ml_dtypes.float8_e3m4, 8),
        (
            {
                "exponent_bits": 4,
                "mantissa_bits": 3,
                "bias": 8,
                "nan": True,
                "negative_zero": False,
            },
            ml_dtypes.float8_e4m3fnuz,
            8,
        ),
        (
            {
                "exponent_bits": 5,
                "mantissa_bits": 2,
                "bias": 16,
                "nan": True,
                "negative_zero": False,
            },
            ml_dtypes.float8_e5m2fnuz,
            8,
        ),
    ],
)
def test_floats_have_the_values_of_ml_dtypes(content: object, dtype: Any, bits: int) -> None:
    assert finite(content) == of_library(dtype, bits)


def test_integers_lists_and_hif8_have_their_values() -> None:
    assert finite("int3") == [-3, -2, -1, 0, 1, 2, 3]
    assert finite({"integer_bits": 3, "symmetric": False, "step": 0.5}) == [
        i / 2 for i in range(-4, 4)
    ]
    assert finite({"values": [1, -1, 0.25]}) == [-1, 0.25, 1]
    assert element_of("hif8") is HIF8
    assert element_of("e4m3") is E4M3
    # OCP MX v1.0 section 5.3.4: the largest magnitude is 1 + 63/64.
    mxint8 = element_of({"integer_bits": 8, "step": 2.0**-6})
    assert (mxint8.max, mxint8.emax, mxint8.bits) == (1 + 63 / 64, 0, 8)
    assert finite("e0m7") == finite({"integer_bits": 8, "step": 2.0**-6})


def test_the_amax_of_a_list_is_brought_to_what_both_signs_reach() -> None:
    assert element_of({"values": [-1, 0, 0.5]}).max == 0.5
    assert element_of({"values": [0, 1, 3]}).max == 3
    assert element_of({"values": [-3, -1]}).max == 3


def test_block_scales_lose_the_code_of_all_ones() -> None:
    ue5m3 = scale_element_of("ue5m3")
    assert ue5m3 is not None
    assert (ue5m3.max, ue5m3.emin) == (1.75 * 2**16, -14)
    e4m3 = scale_element_of("e4m3")
    assert e4m3 is not None
    assert (e4m3.max, e4m3.emin) == (448, -6)
    assert scale_element_of("bf16") is None


NAME = "a name such as e3m3, int8 or hif8, or keys with exponent_bits, integer_bits or values"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("q4", f"element must be {NAME}, got 'q4'"),
        (3, f"element must be {NAME}, got 3"),
        ({}, f"element must be {NAME}, got the keys of nothing"),
        ("e9m1", "exponent_bits must be between 0 and 8, got 9"),
        ("e3m11", "mantissa_bits must be between 0 and 10, got 11"),
        ("e8m9", "element e8m9 must have at most 16 bits with its sign, got 18"),
        ("e0m0", "element e0m0 has no finite value besides zero"),
        ("e8m3", "element e8m3 with bias 127 has values beyond float32's largest"),
        (
            {"exponent_bits": 8, "mantissa_bits": 3, "bias": 200},
            "element e8m3 with bias 200 has normal values below float32's smallest normal one",
        ),
        ({"exponent_bits": 3}, "element.mantissa_bits is missing"),
        (
            {"exponent_bits": 3, "mantissa_bits": True},
            "element.mantissa_bits must be a whole number",
        ),
        (
            {"exponent_bits": 3, "mantissa_bits": 2, "infinity": "no"},
            "element.infinity must be true or false, got 'no'",
        ),
        (
            {"exponent_bits": 1, "mantissa_bits": 0, "infinity": True},
            "no finite value besides zero",
        ),
        ({"integer_bits": 1}, "integer_bits must be between 2 and 11, got 1"),
        ({"integer_bits": 8, "step": 0.3}, "element.step must be a power of two, got 0.3"),
        (
            {"integer_bits": 8, "bias": 1},
            "unknown key element.bias; allowed beside it: integer_bits",
        ),
        ({"values": 3}, "element.values must be a list of numbers, got 3"),
        ({"values": [1, 10**400]}, "element.values must be a list of numbers, got [1, 1000"),
        ({"values": [1]}, "the number of element.values must be between 2 and 256, got 1"),
        ({"values": [1, 1 + 2**-30]}, "element.values must differ in float32, got one twice"),
        ({"values": [1, 1e39]}, "element.values must be finite in float32, got 1e+39"),
    ],
)
def test_nonsense_is_refused_in_one_line(content: object, words: str) -> None:
    with pytest.raises(ValueError, match=r"element|_bits") as caught:
        element_of(content)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_scale_without_mantissa_is_e8m0() -> None:
    with pytest.raises(ValueError, match="scale ue8m0 has no mantissa: take e8m0"):
        scale_element_of("ue8m0")
