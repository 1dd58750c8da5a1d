"""A specification is validated against its format, and errors state what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantexp.formats import Rounding, ScaleRule, Scaling, get_format, quantise, resolve


def test_missing_options_have_the_formats_defaults() -> None:
    options = resolve("mxfp8")
    assert (options.block, options.scale_rule) == (32, ScaleRule.FLOOR)
    assert options.rounding is Rounding.EVEN
    assert resolve("hifp8").rounding is Rounding.AWAY
    assert resolve("hifp8").amax_target == 15.0


def test_enums_and_their_values_mean_the_same() -> None:
    assert resolve("mxfp4", scale_rule="rceil", rounding="away") == resolve(
        "mxfp4", scale_rule=ScaleRule.RCEIL, rounding=Rounding.AWAY
    )
    assert resolve("hifp8", scaling="current") == resolve("hifp8", scaling=Scaling.CURRENT)


@pytest.mark.parametrize(
    ("fmt", "options", "words"),
    [
        (
            "hifp8",
            {"block": 32},
            "hifp8 has no option block: it has amax, amax_target, offset, rounding, saturate, scaling, seed",
        ),
        ("hifp8", {"scale_rule": "floor"}, "hifp8 has no option scale_rule"),
        (
            "mxfp8",
            {"saturate": False},
            "mxfp8_e4m3 has no option saturate: it has block, offset, rounding, scale_rule, seed",
        ),
        ("mxfp8", {"scaling": "current"}, "mxfp8_e4m3 has no option scaling"),
        ("mxfp4", {"amax_target": 15.0}, "mxfp4_e2m1 has no option amax_target"),
        ("bf16", {"block": 32}, "bf16 has no option block: it has no options"),
        ("bf16", {"scale_rule": "even"}, "bf16 has no option scale_rule"),
        ("bf16", {"rounding": "even"}, "bf16 has no option rounding"),
        ("bf16", {"saturate": False}, "bf16 has no option saturate"),
        ("bf16", {"scaling": "exact"}, "bf16 has no option scaling"),
        ("mxfp8", {"pre_scale": True}, "mxfp8_e4m3 has no option pre_scale"),
        ("mxfp6_e2m3", {"pre_scale": True}, "mxfp6_e2m3 has no option pre_scale"),
        ("hifp8", {"pre_scale": True}, "hifp8 has no option pre_scale"),
        ("nvfp4", {"scale_rule": "floor"}, "nvfp4_e2m1 has no option scale_rule"),
        ("nvfp4", {"saturate": False}, "nvfp4_e2m1 has no option saturate"),
        ("nvfp4", {"amax_target": 6.0}, "nvfp4_e2m1 has no option amax_target"),
        ("fp8_e4m3", {"block": 32}, "fp8_e4m3 has no option block"),
    ],
)
def test_an_option_the_format_does_not_have_is_refused_by_name(
    fmt: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(fmt, **options)


@pytest.mark.parametrize(
    ("fmt", "options", "words"),
    [
        (
            "mxfp8",
            {"scale_rule": "round"},
            "scale_rule must be one of floor, rceil, ceil, even, got 'round'",
        ),
        (
            "mxfp8",
            {"rounding": "up"},
            "rounding must be one of even, away, zero, stochastic, got 'up'",
        ),
        (
            "hifp8",
            {"scaling": "later"},
            "scaling must be one of none, current, exact, delayed, got 'later'",
        ),
    ],
)
def test_an_unknown_choice_is_answered_with_all_choices(
    fmt: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(fmt, **options)


@pytest.mark.parametrize("block", [0, -32, 24, 2.0, True])
def test_a_block_is_a_power_of_two(block: Any) -> None:
    with pytest.raises(
        ValueError, match=f"block must be a power of two of at least 1, got {block}"
    ):
        resolve("mxfp8", block=block)


@pytest.mark.parametrize("target", [0.0, -1.0, float("inf"), float("nan")])
def test_an_amax_target_is_finite_and_positive(target: float) -> None:
    with pytest.raises(ValueError, match=f"amax_target must be finite and above 0, got {target}"):
        resolve("hifp8", scaling="current", amax_target=target)


def test_nothing_overflows_that_is_rounded_towards_zero() -> None:
    with pytest.raises(ValueError, match="saturate=false has no meaning with rounding 'zero'"):
        resolve("fp8_e4m3", rounding="zero", saturate=False)


def test_an_amax_means_nothing_without_scaling() -> None:
    words = "has no meaning with scaling 'none': leave it out, or scale"
    with pytest.raises(ValueError, match=f"amax_target {words}"):
        resolve("hifp8", amax_target=224.0)
    with pytest.raises(ValueError, match=f"amax {words}"):
        quantise(torch.ones(3), "hifp8", amax=torch.ones(()))


@pytest.mark.parametrize(
    ("name", "of_call", "words"),
    [
        ("mxfp4", {"amax": torch.ones(())}, "mxfp4_e2m1 has no option amax"),
        ("bf16", {"seed": 1}, "bf16 has no option seed"),
    ],
)
def test_arguments_of_a_call_are_refused_if_the_format_does_not_have_them(
    name: str, of_call: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        quantise(torch.ones(3), name, **of_call)


def test_stochastic_rounding_needs_a_seed() -> None:
    with pytest.raises(
        ValueError,
        match=r"rounding 'stochastic' needs a seed, an integer in \[0, 2\^64\), got None",
    ):
        quantise(torch.ones(3), "mxfp4", rounding="stochastic")


@pytest.mark.parametrize("name", ["seed", "offset"])
def test_a_seed_means_nothing_where_rounding_is_not_stochastic(name: str) -> None:
    words = f"{name} has no meaning with rounding 'even': leave it out, or round stochastically"
    only: dict[str, Any] = {name: 1}
    with pytest.raises(ValueError, match=words):
        quantise(torch.ones(3), "mxfp4", **only)


@pytest.mark.parametrize("name", ["seed", "offset"])
@pytest.mark.parametrize("value", [-1, 1 << 64, 1.0, True, "1"])
def test_seed_and_offset_are_integers_of_64_bits(name: str, value: bool | float | str) -> None:
    of_call: dict[str, Any] = {"seed": 1, name: value}
    with pytest.raises(
        ValueError, match=rf"{name} must be an integer in \[0, 2\^64\), got {value!r}"
    ):
        quantise(torch.ones(3), "mxfp4", rounding="stochastic", **of_call)


def test_delayed_scaling_needs_the_amax_of_the_steps_before() -> None:
    words = (
        r"scaling 'delayed' needs amax, the largest of the steps before \(AmaxHistory\.amax_for\)"
    )
    with pytest.raises(ValueError, match=words):
        quantise(torch.ones(3), "hifp8", scaling="delayed")
    assert resolve("hifp8", scaling="delayed").scaling is Scaling.DELAYED


def test_a_specification_is_used_as_it_is() -> None:
    spec = resolve("mxfp4", block=16, rounding="away")
    assert resolve(spec) is spec
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    expected = quantise(x, get_format("mxfp4"), axis=0, block=16, rounding="away")
    assert torch.equal(quantise(x, spec, axis=0), expected)


def test_options_beside_a_specification_are_refused() -> None:
    words = "a QuantSpec has all its options: leave out block, scale_rule, or change them in it"
    with pytest.raises(ValueError, match=words):
        quantise(torch.ones(3), resolve("mxfp4"), block=16, scale_rule="ceil")


def test_even_the_default_scaling_beside_a_specification_is_refused() -> None:
    with pytest.raises(ValueError, match="leave out scaling, or change them in it"):
        quantise(torch.ones(3), resolve("hifp8", scaling="current"), scaling="none")
