"""Slots that a site cannot have are refused with their key."""

from __future__ import annotations

from typing import Any

import pytest

from quantexp.formats.types import ScaleRule
from quantexp.quant.sites import Site
from quantexp.quant.slots import resolve_site
from quantexp.schema import (
    LinearDgrad,
    LinearFprop,
    LinearSite,
    LinearWgrad,
    PvDgradV,
    PvFprop,
    PvSite,
    QkDgradK,
    QkFprop,
    QkSite,
    Slot,
)

from .test_slots import linear, named, refusal

FORMATS = (
    "bf16, bfloat16, fp16_scaled, fp4_ue5m3, fp8_128x128, fp8_128x128_pow2, fp8_1x128, fp8_1x128_pow2, fp8_e4m3, "
    "fp8_e5m2, hifloat4, hifp8, if4, int4_g128, "
    "mxfp4, mxfp4_e2m1, mxfp6_e2m3, mxfp6_e3m2, mxfp8, mxfp8_e4m3, mxfp8_e5m2, mxint8, nvfp4, nvfp4_16x16, nvfp4_e2m1, "
    "nvfp4_four_over_six, nvfp4_four_over_six_16x16, nvfp4_ms_eden, reuse"
)


def test_options_of_the_site_do_not_carry_over_to_another_format() -> None:
    site = LinearSite(format="mxfp8", block=16, scale_rule="ceil")
    site.wgrad.g = Slot(format="hifp8")
    site.wgrad.x = Slot(format="mxfp4")
    operands = named(resolve_site(Site.LINEAR, site))
    assert operands["wgrad.g"].fmt.block is None
    assert operands["wgrad.x"].block == 32
    assert operands["wgrad.x"].scale_rule is ScaleRule.FLOOR


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


def test_clipping_a_gradients_own_quantisation_is_refused() -> None:
    site = LinearSite(format="mxfp4")
    site.wgrad.g = Slot(clip_gradient=True)
    assert refusal(site) == (
        "quant.linear.wgrad.g.clip_gradient is for the operands of the forward product, whose quantisation is derived, "
        "got true; remove it, or set quant.linear.fprop"
    )


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (
            {"format": "if4"},
            "if4, whose blocks have more than a scale that follows from their amax",
        ),
        ({"pre_scale": True}, "pre_scale, under which a part of the weight is rounded"),
        ({"hadamard": "random"}, "a Hadamard transform, whose elements are not the weight's"),
        (
            {"rounding": "stochastic"},
            "stochastic rounding, whose mean has the derivative 1 already",
        ),
    ],
)
def test_dge_is_refused_where_it_has_no_meaning(keys: dict[str, Any], what: str) -> None:
    assert refusal(LinearSite(**{"format": "mxfp4", **keys}, dge=5.0)) == (
        f"quant.linear.dge has no meaning for {what}; remove one of them"
    )


@pytest.mark.parametrize(
    ("site", "config", "words"),
    [
        (
            Site.PV,
            PvSite(fprop=PvFprop(v=Slot(unnormalised=True))),
            "quant.pv.fprop.v.unnormalised is for pv.fprop.P, got true; remove it, or set "
            "quant.pv.fprop.P.unnormalised",
        ),
        (
            Site.QK,
            QkSite(delta="o"),
            "quant.qk.delta is for pv.fprop.P, got o; remove it, or set quant.pv.fprop.P.delta",
        ),
        (
            Site.PV,
            PvSite(max_factor=2.0),
            "quant.pv.max_factor is the factor of the m of exp(S - m), got 2.0 without unnormalised; set "
            "unnormalised=true, or remove it",
        ),
        (Site.PV, PvSite(delta="dO"), "quant.pv.delta must be one of P, o, got 'dO'"),
        (
            Site.PV,
            PvSite(format="mxfp4", unnormalised=True, clip_gradient=True),
            "quant.pv.fprop.P.clip_gradient has no meaning beside unnormalised: exp(S - m) saturates, and the gradient "
            "is that of P; remove one of them",
        ),
        (
            Site.PV,
            PvSite(format="mxfp4", unnormalised=True, dgrad_v=PvDgradV(P=Slot(format="reuse"))),
            "quant.pv.dgrad_v.P.format must not be reuse: the forward copy of P is exp(S - m), not divided by its "
            "row's sum; give it a format, or remove unnormalised",
        ),
    ],
    ids=["another slot", "another site", "factor alone", "delta", "clipped", "copy"],
)
def test_options_of_the_softmax_are_refused_where_they_have_no_meaning(
    site: Site, config: Any, words: str
) -> None:
    assert refusal(config, site) == words


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
            "rounding must be one of even, away, zero, stochastic, got 'up'",
        ),
        (
            {"format": "hifp8", "rounding": "up"},
            "rounding must be one of away, even, zero, stochastic, got 'up'",
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
    message = refusal(LinearSite(format="mxfp4", of="x"))
    assert message.startswith("quant.linear.of must be high, forward or one of bf16, ")
    assert message.endswith(", got 'x'")
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
