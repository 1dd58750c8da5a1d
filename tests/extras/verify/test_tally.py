"""Counts, and the output for a mismatch."""

from __future__ import annotations

import numpy as np
import pytest

from quantexp.extras.verify.exact import Case
from quantexp.extras.verify.tally import EXAMPLES, Tally, bits, describe, differing

WHERE = ("mxfp8_e4m3", "reference (cpu)", "exact gold")


def test_equal_arrays_are_counted_and_differ_nowhere() -> None:
    tally = Tally()
    x = np.array([1.0, -0.0, np.nan], np.float32)
    tally.add(WHERE, "quantise", x, x.copy())
    tally.add(WHERE, "encode", np.zeros(5, np.uint8), np.zeros(5, np.uint8))
    (row,) = tally.rows
    assert (row.format, row.kernel, row.oracle) == WHERE
    assert (row.cases, row.mismatches, row.examples) == (8, 0, [])


def test_the_sign_of_a_zero_and_one_ulp_differ_and_nans_payload_does_not() -> None:
    a = np.array([0.0, 1.0, np.nan, 2.0], np.float32)
    b = np.array([-0.0, np.nextafter(np.float32(1), np.float32(2)), -np.nan, 2.0], np.float32)
    assert differing(a, b).tolist() == [True, True, False, False]


def test_a_mismatch_is_shown_with_the_bits_of_input_expected_and_got() -> None:
    case = Case("mxfp8_e4m3", np.array([[1.0, 3.0]], np.float32), "bfloat16", options={"block": 2})
    tally = Tally()
    tally.add(WHERE, "quantise", case.x, np.array([[1.0, 3.5]], np.float32), case=case)
    (one,) = tally.rows[0].examples
    assert (one.what, one.request, one.at) == ("quantise", "bfloat16 1x2 block=2", [0, 1])
    assert (one.input, one.expected, one.got) == (
        "0x4040 (3)",
        "0x40400000 (3)",
        "0x40600000 (3.5)",
    )


def test_only_the_first_mismatches_of_each_result_are_kept() -> None:
    tally = Tally()
    for _ in range(2):
        tally.add(WHERE, "encode", np.zeros(99, np.uint8), np.ones(99, np.uint8))
    tally.add(WHERE, "scales", np.zeros(2, np.uint8), np.ones(2, np.uint8))
    assert [one.what for one in tally.rows[0].examples] == ["encode"] * EXAMPLES + ["scales"] * 2
    assert tally.rows[0].examples[0].got == "0x01"


def test_values_unknown_to_an_oracle_are_neither_counted_nor_wrong() -> None:
    tally = Tally()
    known = np.array([True, False, False])
    tally.add(WHERE, "encode", np.zeros(3, np.uint8), np.array([0, 1, 1], np.uint8), known=known)
    assert (tally.rows[0].cases, tally.mismatches) == (1, 0)


def test_another_shape_is_wrong_as_a_whole() -> None:
    tally = Tally()
    tally.add(WHERE, "scales", np.zeros((4, 2), np.uint8), np.zeros((4, 3), np.uint8))
    assert tally.mismatches == 8
    assert tally.rows[0].examples[0].what == "shape of scales"


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (np.uint8(0x7E), "float32", "0x7e"),
        (np.float32(1.5), "float32", "0x3fc00000 (1.5)"),
        (np.float32(1.5), "float16", "0x3e00 (1.5)"),
        (np.float32(np.nan), "bfloat16", "0x7fc0 (nan)"),
    ],
)
def test_bits_are_hexadecimal(value: object, dtype: str, text: str) -> None:
    assert bits(value, dtype) == text


def test_a_case_is_described_by_its_tensor_and_options() -> None:
    case = Case("mxfp4_e2m1", np.ones((5, 7)), axis=0, options={"scale_rule": "even"}, packed=True)
    assert describe(case) == "float32 5x7 axis=0 scale_rule=even packed"
