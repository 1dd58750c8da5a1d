"""Laws that hold for any tensor, tested by hypothesis over all float32 bit patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from quantexp.extras.verify.rational import FP8_ELEMENTS, MX_ELEMENTS, SCALE_RULES
from quantexp.formats import FORMATS, encode, quantise

from .tensors import assert_same

all_formats = pytest.mark.parametrize("name", FORMATS)
all_mx = pytest.mark.parametrize("name", MX_ELEMENTS)
mx_options = st.fixed_dictionaries(
    {"scale_rule": st.sampled_from(SCALE_RULES), "rounding": st.sampled_from(["even", "away"])}
)
#: The values of each option of `quantise` for which the laws hold; a format uses those it has.
LAWFUL = {
    "scale_rule": st.sampled_from(SCALE_RULES),
    "rounding": st.sampled_from(["even", "away"]),
    "scaling": st.sampled_from(["none", "current", "exact"]),
    "block": st.sampled_from([1, 8, 32]),
}


def options_of(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Any options the format has."""
    lawful = {key: values for key, values in LAWFUL.items() if key in FORMATS[name].options}
    return st.fixed_dictionaries({}, optional=lawful)


bits = st.integers(0, 2**32 - 1)


@st.composite
def blocks(draw: st.DrawFn, *, span: int = 40) -> torch.Tensor:
    """32 finite values whose exponents lie within `span` of each other, anywhere in float32."""
    top = draw(st.integers(0, 254))
    patterns = draw(st.lists(bits, min_size=32, max_size=32))
    fields = [max(0, top - (p >> 23) % span) << 23 for p in patterns]
    raw = [(p & 0x807FFFFF) | field for p, field in zip(patterns, fields, strict=True)]
    return torch.from_numpy(np.array(raw, dtype=np.uint32).view(np.float32))


@all_mx
@given(x=blocks(), options=mx_options)
def test_quantising_mx_again_changes_nothing(
    name: str, x: torch.Tensor, options: dict[str, Any]
) -> None:
    once = quantise(x, name, **options)
    assume(once.isfinite().all())  # in the last binade a product may exceed float32
    assert_same(quantise(once, name, **options), once)


@given(
    x=blocks(),
    scaling=st.sampled_from(["none", "current"]),
    rounding=st.sampled_from(["even", "away"]),
)
def test_quantising_hif8_again_changes_nothing(
    x: torch.Tensor, scaling: str, rounding: str
) -> None:
    """At a target of 15 (see test_grid for 224); results beyond float32 are excluded."""
    options: dict[str, Any] = {"scaling": scaling, "rounding": rounding}
    once = quantise(x, "hifp8", **options)
    assume(once.isfinite().all())
    assert_same(quantise(once, "hifp8", **options), once)


@pytest.mark.parametrize("name", FP8_ELEMENTS)
@given(
    x=blocks(),
    scaling=st.sampled_from(["none", "current"]),
    rounding=st.sampled_from(["even", "away"]),
)
def test_quantising_fp8_again_changes_nothing(
    name: str, x: torch.Tensor, scaling: str, rounding: str
) -> None:
    options: dict[str, Any] = {"scaling": scaling, "rounding": rounding}
    once = quantise(x, name, **options)
    assume(once.isfinite().all())
    assert_same(quantise(once, name, **options), once)


@given(
    x=blocks(),
    amax=st.floats(2.0**-60, 2.0**90, width=32),
    rounding=st.sampled_from(["even", "away"]),
)
def test_quantising_nvfp4_again_with_its_scale_changes_nothing(
    x: torch.Tensor, amax: float, rounding: str
) -> None:
    """If no block scale is one of E4M3's first three: under those amax may be rounded to 4."""
    options: dict[str, Any] = {
        "scaling": "current",
        "rounding": rounding,
        "amax": torch.tensor(amax),
    }
    _, scales = encode(x, "nvfp4", **options)
    assume(int(scales.block.min()) > 3)
    once = quantise(x, "nvfp4", **options)
    assume(once.isfinite().all())
    assert_same(quantise(once, "nvfp4", **options), once)


@all_formats
@given(x=blocks(), data=st.data())
def test_every_format_is_symmetric_in_sign(name: str, x: torch.Tensor, data: st.DataObject) -> None:
    """Adding 0 makes the negative zeros of the negation positive, as HiF8 has none."""
    options = data.draw(options_of(name))
    negated = -quantise(x, name, **options)
    assert_same(quantise(-x, name, **options), negated + 0.0 if name == "hifp8" else negated)


@all_formats
@given(x=blocks(), data=st.data())
def test_order_is_preserved_within_a_block(name: str, x: torch.Tensor, data: st.DataObject) -> None:
    options = data.draw(options_of(name).filter(lambda options: options.get("block", 32) == 32))
    if name == "nvfp4_e2m1":
        options["block"] = 32
    y = quantise(x.sort().values, name, **options)
    assert (y[1:] >= y[:-1]).all()


@all_mx
@given(x=blocks(span=8), options=mx_options, exponent=st.integers(-20, 20))
def test_mx_commutes_with_powers_of_two_away_from_the_ends(
    name: str, x: torch.Tensor, options: dict[str, Any], exponent: int
) -> None:
    amax = float(x.abs().max())
    assume(2.0**-70 < amax < 2.0**100)
    factor = 2.0**exponent
    assert_same(quantise(x * factor, name, **options), quantise(x, name, **options) * factor)


@pytest.mark.parametrize("name", [name for name in FORMATS if "scaling" in FORMATS[name].options])
@given(x=blocks(span=8), exponent=st.integers(-20, 20))
def test_current_scaling_commutes_with_powers_of_two(
    name: str, x: torch.Tensor, exponent: int
) -> None:
    assume(2.0**-70 < float(x.abs().max()) < 2.0**100)
    factor = 2.0**exponent
    scaled = quantise(x * factor, name, scaling="current")
    assert_same(scaled, quantise(x, name, scaling="current") * factor)


@given(x=blocks(), rounding=st.sampled_from(["even", "away"]))
def test_no_result_is_further_away_than_half_a_step_of_e2m1(x: torch.Tensor, rounding: str) -> None:
    """With ceil nothing saturates: the error is at most half of the largest step, 2 at scale s."""
    y = quantise(x, "mxfp4", scale_rule="ceil", rounding=rounding).double()
    assume(y.isfinite().all())
    _, exponent = np.frexp(float(x.abs().max()))
    s = max(exponent - 2, -127)
    assert float((x.double() - y).abs().max()) <= 2.0**s
