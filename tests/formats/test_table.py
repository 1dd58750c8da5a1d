"""The table of formats, which needs no torch."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

import quantexp.formats
from quantexp.extras.verify.rational import MX_ELEMENTS, mx_magnitudes
from quantexp.formats import FORMATS, Family, Format, Rounding, ScaleRule, Scaling, get_format


def test_the_canonical_names_are_the_ones_that_file_names_use() -> None:
    assert list(FORMATS) == [
        "mxfp8_e4m3",
        "mxfp8_e5m2",
        "mxfp6_e2m3",
        "mxfp6_e3m2",
        "mxfp4_e2m1",
        "nvfp4_e2m1",
        "fp8_e4m3",
        "fp8_e5m2",
        "hifp8",
        "bf16",
    ]
    assert all(name == fmt.name for name, fmt in FORMATS.items())


@pytest.mark.parametrize(
    ("alias", "name"),
    [("mxfp8", "mxfp8_e4m3"), ("mxfp4", "mxfp4_e2m1"), ("nvfp4", "nvfp4_e2m1")],
)
def test_short_names_find_their_format(alias: str, name: str) -> None:
    assert get_format(alias) is FORMATS[name]


def test_a_format_is_its_own_name() -> None:
    assert get_format(FORMATS["hifp8"]) is FORMATS["hifp8"]


def test_an_unknown_name_is_answered_with_all_names() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown number format 'fp7': must be one of bf16, bfloat16, .*, fp8_e4m3, fp8_e5m2, hifloat4, hifp8",
    ):
        get_format("fp7")


@pytest.mark.parametrize("name", MX_ELEMENTS)
def test_elements_agree_with_the_specification(name: str) -> None:
    emin, mantissa_bits, emax, largest = MX_ELEMENTS[name]
    element = FORMATS[name].element
    assert (element.emin, element.mantissa_bits, element.emax, element.max) == (
        emin,
        mantissa_bits,
        emax,
        float(largest),
    )
    num_special = len(element.inf_codes) + len(element.nan_codes)
    assert len(mx_magnitudes(name)) + num_special == element.sign_bit


def test_defaults_are_those_of_the_specifications() -> None:
    for fmt in FORMATS.values():
        is_mx = fmt.family is Family.MX
        assert fmt.block == (32 if is_mx else 16 if fmt.name == "nvfp4_e2m1" else None)
        assert fmt.scale_rule is (ScaleRule.FLOOR if is_mx else None)
        assert fmt.rounding is (Rounding.AWAY if fmt.name == "hifp8" else Rounding.EVEN)
        exact = fmt.name in ("nvfp4_e2m1", "fp8_e4m3", "fp8_e5m2")
        assert fmt.scaling is (Scaling.EXACT if exact else Scaling.NONE)
    targets = {name: fmt.amax_target for name, fmt in FORMATS.items() if fmt.amax_target}
    assert targets == {"nvfp4_e2m1": 2688.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "hifp8": 15.0}


def test_formats_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["bf16"].block = 32  # type: ignore[misc]
    with pytest.raises(TypeError):
        FORMATS["other"] = FORMATS["bf16"]  # type: ignore[index]


def test_listing_formats_imports_no_torch() -> None:
    program = (
        "import sys, quantexp.formats as f; f.get_format('mxfp8'); f.resolve('hifp8');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_every_exported_name_is_there_and_no_other() -> None:
    assert isinstance(quantexp.formats.FORMATS["bf16"], Format)
    for name in quantexp.formats.__all__:
        value = getattr(quantexp.formats, name)
        assert value is not None
        assert not inspect.ismodule(value), f"{name} is the module of that name"
    with pytest.raises(
        AttributeError, match=r"module 'quantexp\.formats' has no attribute 'dequantise'"
    ):
        quantexp.formats.dequantise  # noqa: B018
