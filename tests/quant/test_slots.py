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
    PvDgradV,
    PvSite,
    QkDgradK,
    QkFprop,
    QkSite,
    Slot,
)

FORMATS = (
    "bf16, bfloat16, fp16_scaled, fp4_ue5m3, fp8_128x128, fp8_128x128_pow2, fp8_1x128, fp8_1x128_pow2, fp8_e4m3, "
    "fp8_e5m2, hifp8, int4_g128, "
    "mxfp4, mxfp4_e2m1, mxfp6_e2m3, mxfp6_e3m2, mxfp8, mxfp8_e4m3, mxfp8_e5m2, mxint8, nvfp4, nvfp4_16x16, nvfp4_e2m1, "
    "nvfp4_four_over_six, nvfp4_four_over_six_16x16, reuse"
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


def test_options_of_the_site_do_not_carry_over_to_another_format() -> None:
    site = LinearSite(format="mxfp8", block=16, scale_rule="ceil")
    site.wgrad.g = Slot(format="hifp8")
    site.wgrad.x = Slot(format="mxfp4")
    operands = named(resolve_site(Site.LINEAR, site))
    assert operands["wgrad.g"].fmt.block is None
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
    ("keys", "how"),
    [
        ({"format": "mxfp8"}, "mxfp8_e4m3 with rceil"),
        ({"format": "mxfp4", "scale_rule": "ceil"}, "mxfp4_e2m1 with ceil"),
        ({"format": "mxfp4", "pre_scale": True}, "mxfp4_e2m1 with floor"),
        ({"format": "fp8_e4m3"}, "fp8_e4m3 with exact"),
        ({"format": "hifp8"}, "hifp8 with current"),
    ],
)
def test_clipping_where_nothing_saturates_is_refused(keys: dict[str, Any], how: str) -> None:
    assert refusal(LinearSite(**keys, clip_gradient=True)) == (
        f"quant.linear.clip_gradient has no meaning for {how}, under which nothing saturates, got true; remove it"
    )


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


def test_clipping_a_gradients_own_quantisation_is_refused() -> None:
    site = LinearSite(format="mxfp4")
    site.wgrad.g = Slot(clip_gradient=True)
    assert refusal(site) == (
        "quant.linear.wgrad.g.clip_gradient is for the operands of the forward product, whose quantisation is derived, "
        "got true; remove it, or set quant.linear.fprop"
    )


def test_clipping_under_a_transform_needs_the_gradient_of_the_transform() -> None:
    message = refusal(LinearSite(format="mxfp4", clip_gradient=True, hadamard="random"))
    assert message == (
        "quant.linear.fprop.x.clip_gradient under a Hadamard transform needs the gradient of the transform, got "
        "quant.linear.dgrad.w of high; set quant.linear.dgrad.w.of=forward or quant.linear.dgrad.w.format=reuse, or "
        "remove one of them"
    )
    transformed = Slot(hadamard="deterministic", clip_gradient=True)
    fprop, dgrad = LinearFprop(transformed, transformed), LinearDgrad(w=Slot(of="forward"))
    assert "got quant.linear.wgrad.x of high" in refusal(
        LinearSite(format="mxfp4", fprop=fprop, dgrad=dgrad)
    )
    operands = linear(format="mxfp4", of="forward", fprop=fprop)
    assert operands["fprop.x"].clip_gradient
    site = QkSite(format="mxfp4", fprop=QkFprop(transformed, transformed))
    assert refusal(site, Site.QK) == (
        "quant.qk.fprop.q.clip_gradient has no meaning under a Hadamard transform in attention, whose gradients are "
        "not those of the transform, got true; remove one of them"
    )


def test_a_hadamard_transform_is_chosen_for_each_product() -> None:
    site = LinearSite(format="mxfp4")
    site.wgrad.g = site.wgrad.x = Slot(hadamard="random", hadamard_block=64)
    operands = named(resolve_site(Site.LINEAR, site))
    assert {slot for slot, o in operands.items() if o.is_transformed} == {"wgrad.g", "wgrad.x"}
    assert operands["wgrad.g"].hadamard_block == 64
    assert (operands["wgrad.g"].left, operands["wgrad.x"].left) == (True, False)


# Refusals.


@pytest.mark.parametrize(
    ("g", "x", "got"),
    [
        (
            Slot(hadamard="random"),
            Slot(),
            "g random in blocks of 32, x none",
        ),
        (
            Slot(hadamard="random"),
            Slot(hadamard="deterministic"),
            "g random in blocks of 32, x deterministic in blocks of 32",
        ),
        (
            Slot(hadamard="random", hadamard_block=16),
            Slot(hadamard="random"),
            "g random in blocks of 16, x random in blocks of 32",
        ),
        (Slot(format="bf16"), Slot(hadamard="random"), "g none, x random in blocks of 32"),
    ],
)
def test_transforms_that_do_not_cancel_are_refused(g: Slot, x: Slot, got: str) -> None:
    site = LinearSite(format="mxfp4")
    site.wgrad.g, site.wgrad.x = g, x
    assert refusal(site) == (
        "quant.linear.wgrad must have the same hadamard and hadamard_block for both operands, so that they cancel in "
        f"the product, got {got}; a slot in the working precision has none"
    )


def test_reuse_of_a_transformed_forward_copy_is_refused() -> None:
    site = QkSite(format="mxfp4", hadamard="random")
    site.dgrad_q.k = Slot(format="reuse")
    site.dgrad_q.dS = Slot(format="bf16")
    assert refusal(site, Site.QK) == (
        "quant.qk.dgrad_q.k.format must not be reuse: the forward copy of k is Hadamard-transformed along head_dim, "
        "and attention's gradients are not transformed back; take another, or give the forward product no transform"
    )
    dgrad = LinearDgrad(w=Slot(format="reuse"), g=Slot(format="bf16"))
    assert refusal(LinearSite(format="mxfp4", hadamard="random", dgrad=dgrad)) == (
        "quant.linear.dgrad.w.format must not be reuse: the forward copy of w has random signs, other ones in each "
        "micro-batch, and one product of an expert adds several; give the forward product hadamard=deterministic, or "
        "take another"
    )


def test_transform_of_a_copy_that_is_used_again_is_none_of_the_backward_product() -> None:
    fprop = LinearFprop(*[Slot(format="mxfp4", hadamard="deterministic", clip_gradient=True)] * 2)
    again = Slot(format="reuse")
    operands = linear(fprop=fprop, dgrad=LinearDgrad(w=again), wgrad=LinearWgrad(x=again))
    assert operands["dgrad.w"] == replace(operands["fprop.w"], reuse=True, clip_gradient=False)
    with_transform = LinearDgrad(w=again, g=Slot(format="mxfp4", hadamard="deterministic"))
    assert "got g deterministic in blocks of 32, w none" in refusal(
        LinearSite(fprop=fprop, dgrad=with_transform, wgrad=LinearWgrad(x=again))
    )


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
        ({"format": "bf16", "hadamard": "random"}, "hadamard does not apply to bf16, got 'random'"),
        (
            {"format": "mxfp8", "pre_scale": True},
            "pre_scale does not apply to mxfp8_e4m3, got True",
        ),
        ({"format": "mxfp8", "window": 4}, "window does not apply to mxfp8_e4m3, got 4"),
        ({"format": "nvfp4", "saturate": True}, "saturate does not apply to nvfp4_e2m1, got True"),
        ({"format": "fp8_e4m3", "block": 32}, "block does not apply to fp8_e4m3, got 32"),
        ({"format": "bf16", "rounding": "even"}, "rounding does not apply to bf16, got 'even'"),
    ],
)
def test_option_the_format_lacks_is_refused(keys: dict[str, Any], message: str) -> None:
    refused = refusal(LinearSite(**keys))
    assert refused.startswith(f"quant.linear.{message}")
    assert refused.endswith(
        "; remove it, or choose the whole site with quant/linear=, quant/qk=, quant/pv= or quant/output="
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
            {"format": "mxfp8", "rounding": "up"},
            "rounding must be one of even, away, stochastic, got 'up'",
        ),
        (
            {"format": "hifp8", "rounding": "up"},
            "rounding must be one of away, even, stochastic, got 'up'",
        ),
        (
            {"format": "hifp8", "scaling": "later"},
            "scaling must be one of current, none, exact, delayed, got 'later'",
        ),
        ({"format": "mxfp8", "block": 24}, "block must be a power of two, got 24"),
        ({"format": "mxfp8", "block": 0}, "block must be a power of two, got 0"),
        (
            {"format": "mxfp8", "hadamard": "fast"},
            "hadamard must be one of none, deterministic, random, got 'fast'",
        ),
        (
            {"format": "mxfp8", "hadamard": "random", "hadamard_block": 24},
            "hadamard_block must be a power of two of at least 2, got 24",
        ),
        (
            {"format": "mxfp8", "hadamard": "random", "hadamard_block": 1},
            "hadamard_block must be a power of two of at least 2, got 1",
        ),
        (
            {"format": "mxfp8", "hadamard_block": 32},
            "hadamard_block is the size of a Hadamard transform, got 32 without one; remove it, or",
        ),
        (
            {"format": "hifp8", "window": 4},
            "window is for delayed scaling, got 4 with scaling current; remove it, or set scaling=d",
        ),
        (
            {"format": "hifp8", "scaling": "delayed", "window": 0},
            "window must be at least 1, got 0",
        ),
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
def test_reuse_without_an_operand_of_the_forward_is_refused(
    site: Site, config: LinearSite | QkSite | PvSite, slot: str
) -> None:
    product, operand = slot.split(".")
    setattr(getattr(config, product), operand, Slot(format="reuse"))
    message = refusal(config, site)
    assert message.startswith(
        f"quant.{site.value}.{slot}.format must not be reuse: {operand} is no operand of the "
        "forward product; choose one of bf16, "
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


@pytest.mark.parametrize(
    ("site", "config", "slot", "words"),
    [
        (
            Site.LINEAR,
            LinearSite(format="mxfp4", fprop=LinearFprop(x=Slot(of="forward"))),
            "linear.fprop.x",
            "in the forward product, which has no earlier copy; remove it",
        ),
        (
            Site.LINEAR,
            LinearSite(format="mxfp4", wgrad=LinearWgrad(g=Slot(of="forward"))),
            "linear.wgrad.g",
            "g is no operand of the forward product; take high",
        ),
        (
            Site.LINEAR,
            LinearSite(
                format="mxfp4",
                fprop=LinearFprop(*[Slot(hadamard="random")] * 2),
                dgrad=LinearDgrad(w=Slot(of="forward")),
            ),
            "linear.dgrad.w",
            "the forward copy of w has random signs, other ones in each micro-batch, and one product of an expert adds "
            "several; give the forward product hadamard=deterministic, or take another",
        ),
        (
            Site.QK,
            QkSite(
                format="mxfp4",
                fprop=QkFprop(*[Slot(hadamard="deterministic")] * 2),
                dgrad_k=QkDgradK(q=Slot(of="forward")),
            ),
            "qk.dgrad_k.q",
            "the forward copy of q is Hadamard-transformed along head_dim, and attention's gradients are not "
            "transformed back; take another, or give the forward product no transform",
        ),
        (
            Site.PV,
            PvSite(format="mxfp4", dgrad_v=PvDgradV(P=Slot(of="forward"))),
            "pv.dgrad_v.P",
            "P is computed anew in the backward pass, tile by tile; take high, or quant.pv.dgrad_v.P.format=reuse",
        ),
    ],
)
def test_forward_copy_that_cannot_be_quantised_again_is_refused(
    site: Site, config: LinearSite | QkSite | PvSite, slot: str, words: str
) -> None:
    message = refusal(config, site)
    assert message.startswith(f"quant.{slot}.of must not be forward")
    assert message.endswith(words)


def test_unknown_source_is_refused() -> None:
    assert refusal(LinearSite(format="mxfp4", of="x")) == (
        "quant.linear.of must be one of high, forward, got 'x'"
    )
    assert refusal(LinearSite(format="bf16", of="forward")) == (
        "quant.linear.of does not apply to bf16, got 'forward'; remove it, or choose the whole site with "
        "quant/linear=, quant/qk=, quant/pv= or quant/output="
    )


def test_option_beside_reuse_is_refused() -> None:
    site = QkSite(format="mxfp8")
    site.dgrad_q.k = Slot(format="reuse", block=16)
    assert refusal(site, Site.QK).startswith(
        "quant.qk.dgrad_q.k.block does not apply to reuse, got 16"
    )
