"""The displayed name of a slot's format."""

from __future__ import annotations

import pytest

from quantexp.quant.label import describe_format, describe_scheme
from quantexp.schema import Precision


@pytest.mark.parametrize(
    ("name", "precision", "label"),
    [
        ("bf16", Precision.fp32, "high (fp32)"),
        ("bf16", "fp16", "high (fp16)"),
        ("bf16", "bf16", "high (bf16)"),
        ("bf16", None, "high"),
        ("bf16 (forward copy)", "fp32", "high (fp32) (forward copy)"),
        ("mxfp8_e4m3 32 rceil", "fp32", "mxfp8_e4m3 32 rceil"),
    ],
)
def test_a_slot_that_is_not_quantised_is_high_in_its_precision(
    name: str, precision: Precision | str | None, label: str
) -> None:
    assert describe_format(name, precision) == label


def test_the_label_of_bf16_names_the_precision_if_it_is_another() -> None:
    assert describe_scheme("bf16", Precision.bf16) == "bf16"
    assert describe_scheme("bf16", None) == "bf16"
    assert describe_scheme("bf16", "fp32") == "bf16 (nothing quantised, computed in fp32)"
    assert describe_scheme("FA_mxfp8", "fp32") == "FA_mxfp8"
