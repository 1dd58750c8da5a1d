"""Options are checked against the format, and their errors say what is allowed."""

from __future__ import annotations

import pytest

from quantexp.formats import Rounding, ScaleRule, Scaling, resolve


def test_what_is_not_given_is_the_formats_own():
    options = resolve("mxfp8")
    assert (options.block, options.scale_rule) == (32, ScaleRule.FLOOR)
    assert options.rounding is Rounding.EVEN
    assert resolve("hifp8").rounding is Rounding.AWAY
    assert resolve("hifp8").amax_target == 15.0


def test_enums_and_their_values_mean_the_same():
    assert resolve("mxfp4", scale_rule="rceil", rounding="away") == resolve(
        "mxfp4", scale_rule=ScaleRule.RCEIL, rounding=Rounding.AWAY
    )
    assert resolve("hifp8", scaling="current") == resolve("hifp8", scaling=Scaling.CURRENT)


@pytest.mark.parametrize(
    ("fmt", "given", "words"),
    [
        (
            "hifp8",
            {"block": 32},
            "hifp8 has no option block: it has amax, amax_target, rounding, saturate, scaling",
        ),
        ("hifp8", {"scale_rule": "floor"}, "hifp8 has no option scale_rule"),
        (
            "mxfp8",
            {"saturate": False},
            "mxfp8_e4m3 has no option saturate: it has block, rounding, scale_rule",
        ),
        ("mxfp8", {"scaling": "current"}, "mxfp8_e4m3 has no option scaling"),
        ("mxfp4", {"amax_target": 15.0}, "mxfp4_e2m1 has no option amax_target"),
        ("mxfp4", {"has_amax": True}, "mxfp4_e2m1 has no option amax"),
        ("bf16", {"block": 32}, "bf16 has no option block: it has no options"),
        ("bf16", {"scale_rule": "even"}, "bf16 has no option scale_rule"),
        ("bf16", {"rounding": "even"}, "bf16 has no option rounding"),
        ("bf16", {"saturate": False}, "bf16 has no option saturate"),
        ("bf16", {"scaling": "exact"}, "bf16 has no option scaling"),
    ],
)
def test_an_option_the_format_does_not_have_is_refused_by_name(fmt, given, words):
    with pytest.raises(ValueError, match=words):
        resolve(fmt, **given)


@pytest.mark.parametrize(
    ("fmt", "given", "words"),
    [
        (
            "mxfp8",
            {"scale_rule": "round"},
            "scale_rule must be one of floor, rceil, ceil, even, got 'round'",
        ),
        ("mxfp8", {"rounding": "up"}, "rounding must be one of even, away, got 'up'"),
        (
            "hifp8",
            {"scaling": "delayed"},
            "scaling must be one of none, current, exact, got 'delayed'",
        ),
    ],
)
def test_an_unknown_choice_is_answered_with_all_choices(fmt, given, words):
    with pytest.raises(ValueError, match=words):
        resolve(fmt, **given)


@pytest.mark.parametrize("block", [0, -32, 24, 2.0, True])
def test_a_block_is_a_power_of_two(block):
    with pytest.raises(
        ValueError, match=f"block must be a power of two of at least 1, got {block}"
    ):
        resolve("mxfp8", block=block)


@pytest.mark.parametrize("target", [0.0, -1.0, float("inf"), float("nan")])
def test_an_amax_target_is_finite_and_positive(target):
    with pytest.raises(ValueError, match=f"amax_target must be finite and above 0, got {target}"):
        resolve("hifp8", scaling="current", amax_target=target)


@pytest.mark.parametrize("given", [{"amax_target": 224.0}, {"has_amax": True}])
def test_an_amax_means_nothing_without_scaling(given):
    with pytest.raises(
        ValueError, match="has no meaning with scaling 'none': leave it out, or scale"
    ):
        resolve("hifp8", **given)
