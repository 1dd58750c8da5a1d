"""What each slot of a site means, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quantexp.errors import ConfigError
from quantexp.formats.types import Rounding, ScaleRule, Scaling
from quantexp.quant.sites import Product, Site
from quantexp.quant.slots import Operand, resolve_site
from quantexp.schema import LinearSite, PvSite, QkSite, Slot

FORMATS = (
    "bf16, hifp8, mxfp4, mxfp4_e2m1, mxfp6_e2m3, mxfp6_e3m2, mxfp8, mxfp8_e4m3, mxfp8_e5m2, reuse"
)


def linear(**keys: Any) -> dict[str, Operand]:
    """The operands of a linear site, by `product.operand`."""
    return named(resolve_site(Site.LINEAR, LinearSite(**keys)))


def qk(config: QkSite) -> dict[str, Operand]:
    return named(resolve_site(Site.QK, config))


def named(operands: dict[tuple[Product, str], Operand]) -> dict[str, Operand]:
    return {f"{product.value}.{name}": operand for (product, name), operand in operands.items()}


def refusal(config: LinearSite | QkSite | PvSite, site: Site = Site.LINEAR) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_site(site, config)
    return str(caught.value)


def test_site_that_says_nothing_is_the_working_precision() -> None:
    operands = linear()
    assert len(operands) == 6
    assert not any(operand.quantised for operand in operands.values())
    assert operands["wgrad.g"] == Operand("bf16", "tokens")


@pytest.mark.parametrize(
    ("format_name", "canonical", "rule"),
    [
        ("mxfp8", "mxfp8_e4m3", ScaleRule.RCEIL),
        ("mxfp8_e4m3", "mxfp8_e4m3", ScaleRule.RCEIL),
        ("mxfp8_e5m2", "mxfp8_e5m2", ScaleRule.RCEIL),
        ("mxfp4", "mxfp4_e2m1", ScaleRule.FLOOR),
        ("mxfp6_e3m2", "mxfp6_e3m2", ScaleRule.FLOOR),
    ],
)
def test_mx_format_brings_its_schemes_defaults(
    format_name: str, canonical: str, rule: ScaleRule
) -> None:
    operand = linear(format=format_name)["fprop.w"]
    assert operand == Operand(
        canonical, "input_width", block=32, scale_rule=rule, rounding=Rounding.EVEN
    )


def test_hifp8_brings_one_current_scale_and_its_targets() -> None:
    operands = linear(format="hifp8")
    forward = Operand(
        "hifp8",
        "input_width",
        rounding=Rounding.AWAY,
        scaling=Scaling.CURRENT,
        saturate=True,
        amax_target=15.0,
    )
    assert operands["fprop.x"] == forward
    assert operands["fprop.w"] == forward
    assert operands["dgrad.g"].amax_target == operands["wgrad.g"].amax_target == 224.0
    assert operands["dgrad.w"].amax_target == operands["wgrad.x"].amax_target == 15.0


def test_own_keys_win_over_the_sites() -> None:
    site = LinearSite(format="mxfp8", block=32, scale_rule="floor")
    site.wgrad.g = Slot(format="mxfp8_e5m2", block=16)
    site.dgrad.g = Slot(block=64)
    operands = named(resolve_site(Site.LINEAR, site))
    assert (operands["wgrad.g"].format, operands["wgrad.g"].block) == ("mxfp8_e5m2", 16)
    assert operands["dgrad.g"].block == 64
    assert operands["dgrad.g"].scale_rule is ScaleRule.FLOOR


def test_options_of_the_site_do_not_carry_over_to_another_format() -> None:
    site = LinearSite(format="mxfp8", block=16, scale_rule="ceil")
    site.wgrad.g = Slot(format="hifp8")
    site.wgrad.x = Slot(format="mxfp4")
    operands = named(resolve_site(Site.LINEAR, site))
    assert operands["wgrad.g"].block is None
    assert operands["wgrad.x"].block == 32
    assert operands["wgrad.x"].scale_rule is ScaleRule.FLOOR


def test_alias_is_the_same_format_so_options_carry_over() -> None:
    site = LinearSite(format="mxfp8_e4m3", block=16)
    site.wgrad.g = Slot(format="mxfp8")
    assert named(resolve_site(Site.LINEAR, site))["wgrad.g"].block == 16


def test_reuse_is_the_forward_copy_along_the_forwards_axis() -> None:
    site = QkSite(format="mxfp8")
    site.dgrad_q.k = Slot(format="reuse")
    operands = qk(site)
    assert operands["dgrad_q.k"].reuse
    assert operands["dgrad_q.k"].axis == "head_dim"
    assert operands["dgrad_q.k"].format == "mxfp8_e4m3"
    assert not operands["dgrad_k.q"].reuse
    assert operands["dgrad_k.q"].axis == "queries"


def test_reuse_of_an_unquantised_operand_is_not_quantised() -> None:
    site = QkSite()
    site.dgrad_q.k = Slot(format="reuse")
    assert not qk(site)["dgrad_q.k"].quantised


def test_choices_of_scale_rule_rounding_and_scaling_are_taken() -> None:
    for rule in ScaleRule:
        assert linear(format="mxfp8", scale_rule=rule.value)["fprop.x"].scale_rule is rule
    for rounding in Rounding:
        assert linear(format="mxfp4", rounding=rounding.value)["fprop.x"].rounding is rounding
    for scaling in Scaling:
        assert linear(format="hifp8", scaling=scaling.value)["fprop.x"].scaling is scaling
    assert linear(format="hifp8", saturate=False)["fprop.x"].saturate is False


# Refusals.


def test_unknown_format_lists_the_formats() -> None:
    message = refusal(LinearSite(format="fp8"))
    assert message == f"quant.linear.format must be one of {FORMATS}, got 'fp8'"


def test_unknown_format_of_a_slot_names_the_slot() -> None:
    site = QkSite()
    site.fprop.q = Slot(format="x")
    assert refusal(site, Site.QK).startswith("quant.qk.fprop.q.format must be one of bf16, ")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"format": "hifp8", "block": 32}, "block does not apply to hifp8, got 32"),
        ({"format": "hifp8", "scale_rule": "floor"}, "scale_rule does not apply to hifp8, got"),
        ({"format": "mxfp8", "scaling": "none"}, "scaling does not apply to mxfp8_e4m3, got 'no"),
        ({"format": "mxfp4", "saturate": True}, "saturate does not apply to mxfp4_e2m1, got True"),
        ({"format": "bf16", "block": 32}, "block does not apply to bf16, got 32"),
        ({"format": "bf16", "rounding": "even"}, "rounding does not apply to bf16, got 'even'"),
    ],
)
def test_option_the_format_lacks_is_refused(keys: dict[str, Any], message: str) -> None:
    refused = refusal(LinearSite(**keys))
    assert refused.startswith(f"quant.linear.{message}")
    assert refused.endswith(
        "; remove it, or choose the whole site with quant/linear=, quant/qk= or quant/pv="
    )


@pytest.mark.parametrize("site_format", [None, "bf16"])
def test_option_of_an_unquantised_slot_is_refused(site_format: str | None) -> None:
    site = LinearSite(format=site_format)
    site.wgrad.g = Slot(block=16)
    assert refusal(site).startswith("quant.linear.wgrad.g.block does not apply to bf16, got 16")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"format": "mxfp8", "scale_rule": "up"},
            "scale_rule must be one of rceil, floor, ceil, even, got 'up'",
        ),
        (
            {"format": "mxfp4", "scale_rule": "up"},
            "scale_rule must be one of floor, rceil, ceil, even, got 'up'",
        ),
        (
            {"format": "mxfp8", "rounding": "stochastic"},
            "rounding must be one of even, away, got 'stochastic'",
        ),
        ({"format": "hifp8", "rounding": "even"}, "rounding must be one of away, got 'even'"),
        (
            {"format": "hifp8", "scaling": "delayed"},
            "scaling must be one of current, none, exact, got 'delayed'",
        ),
        ({"format": "mxfp8", "block": 24}, "block must be a power of two, got 24"),
        ({"format": "mxfp8", "block": 0}, "block must be a power of two, got 0"),
    ],
)
def test_value_an_option_cannot_have_is_refused(keys: dict[str, Any], message: str) -> None:
    assert refusal(LinearSite(**keys)).startswith(f"quant.linear.{message}")


def test_reuse_in_the_forward_product_is_refused() -> None:
    message = refusal(LinearSite(format="reuse"))
    assert message.startswith(
        "quant.linear.format must not be reuse in the forward product, which has no earlier copy"
    )


@pytest.mark.parametrize(
    ("site", "config", "slot"),
    [
        (Site.LINEAR, LinearSite(), "dgrad.g"),
        (Site.QK, QkSite(), "dgrad_q.dS"),
        (Site.PV, PvSite(), "dgrad_p.dO"),
    ],
)
def test_reuse_of_what_the_forward_does_not_have_is_refused(
    site: Site, config: LinearSite | QkSite | PvSite, slot: str
) -> None:
    product, operand = slot.split(".")
    setattr(getattr(config, product), operand, Slot(format="reuse"))
    message = refusal(config, site)
    assert message.startswith(
        f"quant.{site.value}.{slot}.format must not be reuse: {operand} is no operand of the "
        "forward product; choose one of bf16, "
    )


def test_option_beside_reuse_is_refused() -> None:
    site = QkSite(format="mxfp8")
    site.dgrad_q.k = Slot(format="reuse", block=16)
    assert refusal(site, Site.QK).startswith(
        "quant.qk.dgrad_q.k.block does not apply to reuse, got 16"
    )
