"""The meaning of each slot of a site, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quantexp.errors import ConfigError
from quantexp.formats.spec import QuantSpec, resolve
from quantexp.formats.table import FORMATS as FORMATS_OF_THE_TABLE
from quantexp.formats.types import Axis, Hadamard, Rounding, ScaleRule, Scaling
from quantexp.quant import sites
from quantexp.quant.records import spec_record
from quantexp.quant.sites import Site
from quantexp.quant.slots import resolve_site
from quantexp.schema import (
    LinearDgrad,
    LinearFprop,
    LinearSite,
    LinearWgrad,
    PvSite,
    QkSite,
    Slot,
)


def linear(**keys: Any) -> dict[str, QuantSpec]:
    """The slots of a linear site, by `product.operand`."""
    return named(resolve_site(Site.LINEAR, LinearSite(**keys)))


def qk(config: QkSite) -> dict[str, QuantSpec]:
    return named(resolve_site(Site.QK, config))


def named(slots: dict[sites.Slot, QuantSpec]) -> dict[str, QuantSpec]:
    return {f"{slot.product.value}.{slot.operand}": spec for slot, spec in slots.items()}


def refusal(config: LinearSite | QkSite | PvSite, site: Site = Site.LINEAR) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_site(site, config)
    return str(caught.value)


def test_empty_site_is_the_working_precision() -> None:
    operands = linear()
    assert len(operands) == 6
    assert not any(operand.quantised for operand in operands.values())
    assert operands["wgrad.g"] == QuantSpec(FORMATS_OF_THE_TABLE["bf16"], axis=Axis.TOKENS)


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
    expected = resolve(canonical, block=32, scale_rule=rule, rounding=Rounding.EVEN)
    assert operand == replace(expected, axis=Axis.INPUT_WIDTH)


def test_hifp8_brings_one_current_scale_and_its_targets() -> None:
    operands = linear(format="hifp8")
    forward = resolve(
        "hifp8",
        rounding=Rounding.AWAY,
        scaling=Scaling.CURRENT,
        saturate=True,
        amax_target=15.0,
    )
    forward = replace(forward, axis=Axis.INPUT_WIDTH)
    assert operands["fprop.x"] == forward
    assert operands["fprop.w"] == forward
    assert operands["dgrad.g"].amax_target == operands["wgrad.g"].amax_target == 224.0
    assert operands["dgrad.w"].amax_target == operands["wgrad.x"].amax_target == 15.0


@pytest.mark.parametrize(("name", "target"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_brings_one_exact_scale_to_the_elements_largest_value(name: str, target: float) -> None:
    operands = linear(format=name)
    expected = resolve(
        name,
        rounding=Rounding.EVEN,
        scaling=Scaling.EXACT,
        saturate=True,
        amax_target=target,
    )
    axes = (Axis.INPUT_WIDTH, Axis.OUTPUT_WIDTH, Axis.TOKENS)
    assert set(operands.values()) == {replace(expected, axis=axis) for axis in axes}


def test_nvfp4_brings_blocks_of_16_and_an_exact_scale_of_the_tensor() -> None:
    expected = resolve("nvfp4_e2m1", block=16, rounding=Rounding.EVEN, scaling=Scaling.EXACT)
    assert linear(format="nvfp4")["wgrad.g"] == replace(expected, axis=Axis.TOKENS)


def test_an_option_that_the_format_does_not_have_is_recorded_as_null() -> None:
    options = {"block", "scale_rule", "rounding", "scaling", "saturate", "amax_target"}
    for name, fmt in FORMATS_OF_THE_TABLE.items():
        record = spec_record(linear(format=name)["fprop.x"])
        assert {option for option in options if record[option] is not None} == options & fmt.options


def test_own_keys_win_over_the_sites() -> None:
    site = LinearSite(format="mxfp8", block=32, scale_rule="floor")
    site.wgrad.g = Slot(format="mxfp8_e5m2", block=16)
    site.dgrad.g = Slot(block=64)
    operands = named(resolve_site(Site.LINEAR, site))
    assert (operands["wgrad.g"].fmt.name, operands["wgrad.g"].block) == ("mxfp8_e5m2", 16)
    assert operands["dgrad.g"].block == 64
    assert operands["dgrad.g"].scale_rule is ScaleRule.FLOOR


def test_alias_is_the_same_format_so_options_carry_over() -> None:
    site = LinearSite(format="mxfp8_e4m3", block=16)
    site.wgrad.g = Slot(format="mxfp8")
    assert named(resolve_site(Site.LINEAR, site))["wgrad.g"].block == 16


def test_reuse_is_the_forward_copy_along_the_forwards_axis() -> None:
    site = QkSite(format="mxfp8")
    site.dgrad_q.k = Slot(format="reuse")
    operands = qk(site)
    assert operands["dgrad_q.k"].reuse
    assert operands["dgrad_q.k"].axis is Axis.HEAD_DIM
    assert operands["dgrad_q.k"].fmt.name == "mxfp8_e4m3"
    assert not operands["dgrad_k.q"].reuse
    assert operands["dgrad_k.q"].axis is Axis.QUERIES


def test_reuse_of_an_unquantised_operand_is_not_quantised() -> None:
    site = QkSite()
    site.dgrad_q.k = Slot(format="reuse")
    assert not qk(site)["dgrad_q.k"].quantised


def test_choices_of_scale_rule_rounding_and_scaling_are_accepted() -> None:
    for rule in ScaleRule:
        assert linear(format="mxfp8", scale_rule=rule.value)["fprop.x"].scale_rule is rule
    for rounding in Rounding:
        for name in ("mxfp4", "nvfp4", "fp8_e5m2", "hifp8"):
            assert linear(format=name, rounding=rounding.value)["fprop.x"].rounding is rounding
    for scaling in Scaling:
        assert linear(format="hifp8", scaling=scaling.value)["fprop.x"].scaling is scaling
    assert linear(format="hifp8", saturate=False)["fprop.x"].saturate is False


@pytest.mark.parametrize("name", ["hifp8", "fp8_e4m3", "fp8_e5m2", "nvfp4"])
@pytest.mark.parametrize("scaling", [scaling.value for scaling in Scaling])
def test_every_scaling_can_be_chosen(name: str, scaling: str) -> None:
    """Without a scale there is no amax target."""
    spec = linear(format=name, scaling=scaling)["fprop.x"]
    target = spec_record(spec)["amax_target"]
    assert (target is None) == (scaling == "none" or name == "nvfp4")
    assert spec.scaling is Scaling(scaling)


def test_delayed_scaling_brings_a_window_of_16_iterations() -> None:
    for name in ("hifp8", "fp8_e4m3", "nvfp4"):
        operand = linear(format=name, scaling="delayed")["wgrad.g"]
        assert (operand.scaling, operand.window) == (Scaling.DELAYED, 16)
        assert linear(format=name, scaling="delayed", window=3)["wgrad.g"].window == 3
        assert linear(format=name)["wgrad.g"].window is None


def test_pre_scale_is_set_or_absent() -> None:
    for name in ("mxfp4", "nvfp4"):
        assert linear(format=name, pre_scale=True)["dgrad.g"].pre_scale == 0.75
        assert linear(format=name, pre_scale=False)["dgrad.g"].pre_scale == 1.0
        part = linear(format=name, pre_scale=16 / 17)["dgrad.g"]
        assert part.pre_scale == 16 / 17
        assert spec_record(part)["pre_scale"] == 16 / 17
        assert spec_record(linear(format=name, pre_scale=True)["dgrad.g"])["pre_scale"] is True


@pytest.mark.parametrize(
    ("name", "block"), [("mxfp4", 32), ("nvfp4", 16), ("fp8_e4m3", 32), ("hifp8", 32)]
)
def test_a_hadamard_transform_has_its_formats_block(name: str, block: int) -> None:
    operands = linear(format=name, hadamard="deterministic").values()
    assert {(o.hadamard, o.hadamard_block) for o in operands} == {(Hadamard.DETERMINISTIC, block)}
    assert linear(format=name, hadamard="none")["fprop.x"].hadamard is Hadamard.NONE


def test_a_clipped_gradient_is_the_forward_products() -> None:
    operands = linear(format="mxfp4", clip_gradient=True)
    assert {slot for slot, o in operands.items() if o.clip_gradient} == {"fprop.x", "fprop.w"}
    assert not any(o.clip_gradient for o in linear(format="mxfp4", clip_gradient=False).values())
    site = QkSite(format="mxfp4")
    site.fprop.k = Slot(clip_gradient=True)
    site.dgrad_q.k = Slot(format="reuse")
    assert [slot for slot, o in qk(site).items() if o.clip_gradient] == ["fprop.k"]


@pytest.mark.parametrize(
    "keys",
    [
        {"format": "mxfp8", "scale_rule": "floor"},
        {"format": "mxfp6_e2m3", "scale_rule": "even"},
        {"format": "nvfp4"},
        {"format": "hifp8", "scaling": "none"},
        {"format": "fp8_e5m2", "scaling": "delayed"},
    ],
)
def test_clipping_is_accepted_where_something_can_saturate(keys: dict[str, Any]) -> None:
    assert linear(**keys, clip_gradient=True)["fprop.x"].clip_gradient


def test_dge_is_for_the_weight_of_the_forward_product() -> None:
    operands = linear(format="mxfp4", dge=5.0)
    assert {slot for slot, o in operands.items() if o.dge} == {"fprop.w"}
    site = LinearSite(format="mxfp4")
    site.fprop.x = Slot(dge=5.0)
    assert refusal(site) == (
        "quant.linear.fprop.x.dge is for the weights of the decoder's linear layers, got 5; remove it, or set "
        "quant.linear.fprop.w.dge"
    )
    reused = linear(format="mxfp4", dge=5.0, dgrad=LinearDgrad(w=Slot(format="reuse")))
    assert reused["dgrad.w"].dge is None


def test_a_hadamard_transform_is_chosen_for_each_product() -> None:
    site = LinearSite(format="mxfp4")
    site.wgrad.g = site.wgrad.x = Slot(hadamard="random", hadamard_block=64)
    operands = named(resolve_site(Site.LINEAR, site))
    assert {slot for slot, o in operands.items() if o.is_transformed} == {"wgrad.g", "wgrad.x"}
    assert operands["wgrad.g"].hadamard_block == 64
    assert (operands["wgrad.g"].left, operands["wgrad.x"].left) == (True, False)


# Refusals.


def test_transform_of_a_copy_that_is_used_again_is_none_of_the_backward_product() -> None:
    fprop = LinearFprop(*[Slot(format="mxfp4", hadamard="deterministic", clip_gradient=True)] * 2)
    again = Slot(format="reuse")
    operands = linear(fprop=fprop, dgrad=LinearDgrad(w=again), wgrad=LinearWgrad(x=again))
    assert operands["dgrad.w"] == replace(operands["fprop.w"], reuse=True, clip_gradient=False)
    with_transform = LinearDgrad(w=again, g=Slot(format="mxfp4", hadamard="deterministic"))
    assert "got g deterministic in blocks of 32, w none" in refusal(
        LinearSite(fprop=fprop, dgrad=with_transform, wgrad=LinearWgrad(x=again))
    )


def test_forward_copy_that_is_quantised_again_is_that_of_the_forward_slot() -> None:
    operands = linear(
        format="mxfp4", of="forward", wgrad=LinearWgrad(g=Slot(rounding="stochastic"))
    )
    assert {slot for slot, o in operands.items() if o.of is not None} == {"dgrad.w", "wgrad.x"}
    for again, first in (("dgrad.w", "fprop.w"), ("wgrad.x", "fprop.x")):
        spec = operands[again]
        assert spec.of == replace(operands[first], reuse=True)
        assert replace(spec, of=None) == linear(format="mxfp4")[again]
        assert spec_record(spec)["of"] == "forward"
    assert "of" not in spec_record(operands["fprop.x"])
    site = LinearSite(format="mxfp4", of="forward", wgrad=LinearWgrad(x=Slot(of="high")))
    assert named(resolve_site(Site.LINEAR, site))["wgrad.x"].of is None
    own = linear(format="mxfp4", wgrad=LinearWgrad(x=Slot(of="forward")))
    assert {slot for slot, o in own.items() if o.of is not None} == {"wgrad.x"}


def test_forward_copy_in_the_working_precision_is_the_tensor_itself() -> None:
    operands = linear(format="mxfp4", of="forward", fprop=LinearFprop(x=Slot(format="bf16")))
    assert operands["wgrad.x"].of is None
    assert operands["dgrad.w"].of is not None
