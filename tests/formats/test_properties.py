"""Laws that hold for any tensor, looked for by hypothesis among all float32 bit patterns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quantexp.formats import quantise

from .gold import MX_ELEMENTS, SCALE_RULES
from .tensors import assert_same

all_mx = pytest.mark.parametrize("name", MX_ELEMENTS)
mx_options = st.fixed_dictionaries(
    {"scale_rule": st.sampled_from(SCALE_RULES), "rounding": st.sampled_from(["even", "away"])}
)
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
@settings(deadline=None)
@given(x=blocks(), options=mx_options)
def test_quantising_mx_again_changes_nothing(name, x, options):
    once = quantise(x, name, **options)
    assume(once.isfinite().all())  # in the last binade a product may have no float32 value
    assert_same(quantise(once, name, **options), once)


@settings(deadline=None)
@given(
    x=blocks(),
    scaling=st.sampled_from(["none", "current"]),
    rounding=st.sampled_from(["even", "away"]),
)
def test_quantising_hif8_again_changes_nothing(x, scaling, rounding):
    """At a target of 15 (see test_grid for 224); a result beyond float32 is left out."""
    options = {"scaling": scaling, "rounding": rounding}
    once = quantise(x, "hifp8", **options)
    assume(once.isfinite().all())
    assert_same(quantise(once, "hifp8", **options), once)


@all_mx
@settings(deadline=None)
@given(x=blocks(), options=mx_options)
def test_mx_is_symmetric_in_sign(name, x, options):
    assert_same(quantise(-x, name, **options), -quantise(x, name, **options))


@settings(deadline=None)
@given(x=blocks(), scaling=st.sampled_from(["none", "current", "exact"]))
def test_hif8_is_symmetric_in_sign(x, scaling):
    """Adding 0 makes the negative zeros of the negation positive, as HiF8 has none."""
    assert_same(
        quantise(-x, "hifp8", scaling=scaling), -quantise(x, "hifp8", scaling=scaling) + 0.0
    )


@all_mx
@settings(deadline=None)
@given(x=blocks(), options=mx_options)
def test_order_is_kept_within_a_block(name, x, options):
    y = quantise(x.sort().values, name, **options)
    assert (y[1:] >= y[:-1]).all()


@settings(deadline=None)
@given(x=blocks(), scaling=st.sampled_from(["none", "current", "exact"]))
def test_order_is_kept_within_a_hif8_tensor(x, scaling):
    y = quantise(x.sort().values, "hifp8", scaling=scaling)
    assert (y[1:] >= y[:-1]).all()


@all_mx
@settings(deadline=None)
@given(x=blocks(span=8), options=mx_options, exponent=st.integers(-20, 20))
def test_mx_commutes_with_powers_of_two_away_from_the_ends(name, x, options, exponent):
    amax = float(x.abs().max())
    assume(2.0**-70 < amax < 2.0**100)
    factor = 2.0**exponent
    assert_same(quantise(x * factor, name, **options), quantise(x, name, **options) * factor)


@settings(deadline=None)
@given(x=blocks(span=8), exponent=st.integers(-20, 20))
def test_hif8_with_current_scaling_commutes_with_powers_of_two(x, exponent):
    assume(2.0**-70 < float(x.abs().max()) < 2.0**100)
    factor = 2.0**exponent
    scaled = quantise(x * factor, "hifp8", scaling="current")
    assert_same(scaled, quantise(x, "hifp8", scaling="current") * factor)


@settings(deadline=None)
@given(x=blocks(), rounding=st.sampled_from(["even", "away"]))
def test_no_result_is_further_away_than_half_a_step_of_e2m1(x, rounding):
    """With ceil nothing saturates: the error is at most half of the largest step, 2 at scale s."""
    y = quantise(x, "mxfp4", scale_rule="ceil", rounding=rounding).double()
    assume(y.isfinite().all())
    _, exponent = np.frexp(float(x.abs().max()))
    s = max(exponent - 2, -127)
    assert float((x.double() - y).abs().max()) <= 2.0**s
