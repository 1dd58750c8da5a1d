"""The ten schemes, slot by slot, as in design.md; and the names of schemes."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import pytest
from omegaconf import OmegaConf

from quantexp.config.compose import compose
from quantexp.folders import conf_dir
from quantexp.quant.precision import precision_map
from quantexp.quant.records import entry_record, spec_record
from quantexp.quant.scheme import SCHEMES, content_hash, derived_name
from quantexp.quant.slots import resolve_site, site_configs
from quantexp.schema import QuantConfig, Rule, Slot

BF16 = "bf16"
#: A format's options as in design.md; the axis and the amax target come from the slot.
OPTIONS: dict[str, dict[str, Any]] = {
    "mxfp8": {
        "format": "mxfp8_e4m3",
        "block": 32,
        "scale_rule": "rceil",
        "rounding": "even",
        "scaling": None,
        "saturate": None,
    },
    "mxfp4": {
        "format": "mxfp4_e2m1",
        "block": 32,
        "scale_rule": "floor",
        "rounding": "even",
        "scaling": None,
        "saturate": None,
    },
    "hifp8": {
        "format": "hifp8",
        "block": None,
        "scale_rule": None,
        "rounding": "away",
        "scaling": "current",
        "saturate": True,
    },
    BF16: {
        "format": "bf16",
        "block": None,
        "scale_rule": None,
        "rounding": None,
        "scaling": None,
        "saturate": None,
    },
}
#: Slot -> (axis, hifp8's amax target) if a linear site is quantised.
LINEAR = {
    "fprop.x": ("input_width", 15.0),
    "fprop.w": ("input_width", 15.0),
    "dgrad.g": ("output_width", 224.0),
    "dgrad.w": ("output_width", 15.0),
    "wgrad.g": ("tokens", 224.0),
    "wgrad.x": ("tokens", 15.0),
}
#: Slot -> (axis, is quantised, is the forward copy) if QK is quantised.
QK = {
    "fprop.q": ("head_dim", True, False),
    "fprop.k": ("head_dim", True, False),
    "dgrad_q.dS": ("keys", False, False),
    "dgrad_q.k": ("head_dim", True, True),
    "dgrad_k.dS": ("queries", False, False),
    "dgrad_k.q": ("head_dim", True, True),
}
HIGH = {
    **{site: {s: axis for s, (axis, _) in LINEAR.items()} for site in ("linear", "output")},
    "qk": {
        "fprop.q": "head_dim",
        "fprop.k": "head_dim",
        "dgrad_q.dS": "keys",
        "dgrad_q.k": "keys",
        "dgrad_k.dS": "queries",
        "dgrad_k.q": "queries",
    },
    "pv": {
        "fprop.P": "keys",
        "fprop.v": "keys",
        "dgrad_p.dO": "head_dim",
        "dgrad_p.v": "head_dim",
        "dgrad_v.P": "queries",
        "dgrad_v.dO": "queries",
    },
    "norm": {"fprop.w": "width", "fprop.y": "width"},
}
#: Scheme -> (linear, qk), written out independently of the code.
TEN = {
    "bf16": (BF16, BF16),
    "FA_mxfp8": (BF16, "mxfp8"),
    "FA_mxfp4": (BF16, "mxfp4"),
    "FA_hifp8": (BF16, "hifp8"),
    "linear_mxfp8": ("mxfp8", BF16),
    "linear_mxfp4": ("mxfp4", BF16),
    "linear_hifp8": ("hifp8", BF16),
    "FA_linear_mxfp8": ("mxfp8", "mxfp8"),
    "FA_linear_mxfp4": ("mxfp4", "mxfp4"),
    "FA_linear_hifp8": ("hifp8", "hifp8"),
}


def shipped(scheme: str) -> QuantConfig:
    """A shipped scheme from its files, without Hydra."""
    defaults = OmegaConf.load(conf_dir() / "quant" / f"{scheme}.yaml").defaults
    config = OmegaConf.structured(QuantConfig)
    for entry in defaults:
        for site, choice in entry.items() if entry != "_self_" else ():
            file = conf_dir() / "quant" / site / f"{choice}.yaml"
            config[site] = OmegaConf.merge(config[site], OmegaConf.load(file))
    quant = OmegaConf.to_object(config)
    assert isinstance(quant, QuantConfig)
    return quant


def meaning(quant: QuantConfig) -> dict[str, dict[str, dict[str, object]]]:
    return {
        site.value: {
            f"{slot.product.value}.{slot.operand}": spec_record(spec)
            for slot, spec in resolve_site(site, config).items()
        }
        for site, config in site_configs(quant).items()
    }


def expected(linear: str, qk: str) -> dict[str, dict[str, dict[str, object]]]:
    def record(format_: str, axis: str, target: float, reuse: bool = False) -> dict[str, object]:
        amax_target = target if format_ == "hifp8" else None
        return {**OPTIONS[format_], "axis": axis, "amax_target": amax_target, "reuse": reuse}

    def high(site: str) -> dict[str, dict[str, object]]:
        return {slot: record(BF16, axis, 0.0) for slot, axis in HIGH[site].items()}

    lines, scores = high("linear"), high("qk")
    if linear != BF16:
        lines = {slot: record(linear, axis, amax) for slot, (axis, amax) in LINEAR.items()}
    if qk != BF16:
        scores = {
            slot: record(qk if quantised else BF16, axis, 15.0, reuse)
            for slot, (axis, quantised, reuse) in QK.items()
        }
    others = {site: high(site) for site in ("pv", "output", "norm")}
    return {"linear": lines, "qk": scores, **others}


@pytest.mark.parametrize("scheme", TEN)
def test_scheme_means_exactly_this(scheme: str) -> None:
    assert meaning(shipped(scheme)) == expected(*TEN[scheme])


def test_there_are_these_ten() -> None:
    assert set(SCHEMES) == set(TEN)
    for scheme, sites in SCHEMES.items():
        assert tuple(BF16 if choice == "none" else choice for choice in sites) == TEN[scheme]


@pytest.mark.parametrize("scheme", TEN)
def test_scheme_is_named_after_what_it_does(scheme: str) -> None:
    assert derived_name(shipped(scheme)) == scheme


@pytest.mark.parametrize("format_", ["mxfp8", "mxfp4", "hifp8"])
def test_full_scheme_quantises_every_operand_of_the_scores_along_its_own_axis(format_: str) -> None:
    quant = shipped(f"FA_{format_}")
    extra = OmegaConf.load(conf_dir() / "quant" / "more" / f"FA_full_{format_}.yaml")
    merged = OmegaConf.merge(OmegaConf.structured(quant).qk, extra.qk)
    quant.qk = OmegaConf.to_object(merged)  # type: ignore[assignment]
    operands = meaning(quant)["qk"]
    assert {slot: operand["axis"] for slot, operand in operands.items()} == HIGH["qk"]
    assert {operand["format"] for operand in operands.values()} == {OPTIONS[format_]["format"]}
    assert not any(operand["reuse"] for operand in operands.values())
    if format_ == "hifp8":
        targets = {slot: operand["amax_target"] for slot, operand in operands.items()}
        assert targets["dgrad_q.dS"] == targets["dgrad_k.dS"] == 224.0
        assert targets["fprop.q"] == targets["dgrad_k.q"] == 15.0


#: scheme of quant/more -> format, the linear products that are quantised, and what differs from the format's options.
OF_EXPERIMENTS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "linear_mxfp8_floor": ("mxfp8", ("fprop", "dgrad", "wgrad"), {"scale_rule": "floor"}),
    "linear_mxfp8_floor_fprop": ("mxfp8", ("fprop",), {"scale_rule": "floor"}),
    "linear_mxfp4_fprop": ("mxfp4", ("fprop",), {}),
    "linear_mxfp4_dgrad": ("mxfp4", ("dgrad",), {}),
    "linear_mxfp4_wgrad": ("mxfp4", ("wgrad",), {}),
    "linear_mxfp4_backward": ("mxfp4", ("dgrad", "wgrad"), {}),
}


@pytest.mark.parametrize("scheme", OF_EXPERIMENTS)
def test_schemes_of_experiments_differ_in_one_thing(scheme: str) -> None:
    quant = compose([f"quant=more/{scheme}"], None, {}).quant
    format_, products, options = OF_EXPERIMENTS[scheme]
    operands = meaning(quant)
    assert all(each["format"] == BF16 for site in ("qk", "pv") for each in operands[site].values())
    for slot, operand in operands["linear"].items():
        if slot.partition(".")[0] not in products:
            assert operand["format"] == BF16, slot
            continue
        declared = {**OPTIONS[format_], **options}
        assert {key: operand[key] for key in declared} == declared, slot


def test_weights_alone_are_quantised() -> None:
    linear = meaning(compose(["quant=more/linear_mxfp8_floor_weights"], None, {}).quant)["linear"]
    formats = {slot: (each["format"], each["scale_rule"]) for slot, each in linear.items()}
    weights = {slot for slot in formats if slot.endswith(".w")}
    assert weights == {"fprop.w", "dgrad.w"}
    assert {formats[slot] for slot in weights} == {("mxfp8_e4m3", "floor")}
    assert {formats[slot][0] for slot in formats.keys() - weights} == {BF16}


def test_one_format_for_every_operand_in_fp8() -> None:
    linear = meaning(compose(["quant=more/linear_fp8_e4m3"], None, {}).quant)["linear"]
    assert {each["format"] for each in linear.values()} == {"fp8_e4m3"}
    assert {each["amax_target"] for each in linear.values()} == {448.0}


def test_option_spelt_out_as_the_default_changes_nothing() -> None:
    short = QuantConfig()
    short.linear.format = "mxfp8"
    assert derived_name(short) == "linear_mxfp8"
    assert content_hash(short) == content_hash(shipped("linear_mxfp8"))


def test_site_no_choice_describes_is_custom() -> None:
    quant = shipped("FA_linear_mxfp8")
    quant.linear.wgrad.g = Slot(format="mxfp8_e5m2")
    name = derived_name(quant)
    assert name.startswith("linear_custom+qk_mxfp8~")
    assert name.endswith(content_hash(quant)[:6])


def test_rules_keep_the_sites_names_and_add_a_hash() -> None:
    quant = shipped("linear_mxfp8")
    quant.rules = [Rule(layers=[0], format="mxfp4")]
    assert derived_name(quant) == f"linear_mxfp8~{content_hash(quant)[:6]}"


@pytest.mark.parametrize(
    ("formats", "name"),
    [
        (["bf16"], "bf16"),
        (["mxfp8", None], "rules_mxfp8_e4m3"),
        (["mxfp4", "bf16", "mxfp4"], "rules_mxfp4_e2m1"),
        (["mxfp4", "hifp8"], "rules"),
    ],
)
def test_bf16_with_rules_that_quantise_is_not_named_bf16(
    formats: list[str | None], name: str
) -> None:
    quant = shipped("bf16")
    quant.rules = [Rule(layers=[0], format=each) for each in formats]
    assert derived_name(quant) == f"{name}~{content_hash(quant)[:6]}"


def test_hashes_from_before_later_options_are_unchanged() -> None:
    """A scheme, and one with rules: existing run folders are named by these hashes."""
    quant = QuantConfig()
    quant.linear.format = "mxfp8"
    assert content_hash(quant)[:8] == "6d3c07f6"
    quant.rules = [Rule(layers=[0, -1], format="bf16"), Rule(iterations=[1, None], block=16)]
    assert content_hash(quant)[:8] == "82dabd30"
    quant.rules = [Rule(layers=[0, -1], hadamard="random")]
    first = content_hash(quant)
    quant.rules = [Rule(layers=[0, -1], hadamard="deterministic")]
    assert content_hash(quant) != first


#: Scheme -> hash of its content, and of its map's entries for two layers, from before there was an output layer.
BEFORE_OUTPUT = {
    "bf16": ("ddc74ca3", "11949916"),
    "FA_mxfp8": ("9a6a32fa", "76eef0ed"),
    "FA_mxfp4": ("9a1c6307", "59b73f06"),
    "FA_hifp8": ("e0902052", "6443e3a8"),
    "linear_mxfp8": ("6d3c07f6", "3fbd5112"),
    "linear_mxfp4": ("92c13948", "3941f4f4"),
    "linear_hifp8": ("31b38732", "1fe5b366"),
    "FA_linear_mxfp8": ("87ade712", "f678f2f2"),
    "FA_linear_mxfp4": ("2118e4ef", "d05370ff"),
    "FA_linear_hifp8": ("60e6d2e1", "f0c85395"),
}


@pytest.mark.parametrize("scheme", TEN)
def test_hash_and_map_from_before_the_output_layer_are_unchanged(scheme: str) -> None:
    experiment = compose([f"quant={scheme}", "model.num_layers=2"], None, {})
    modules = precision_map(experiment.model, experiment.quant).values()
    entries = json.dumps([entry_record(entry) for module in modules for entry in module.entries()])
    hashes = content_hash(experiment.quant), hashlib.sha256(entries.encode()).hexdigest()
    assert tuple(each[:8] for each in hashes) == BEFORE_OUTPUT[scheme]


def test_output_layer_adds_to_the_name_and_to_the_hash() -> None:
    quant = compose(["quant=linear_mxfp8", "quant/output=mxfp8"], None, {}).quant
    assert quant.name == "linear_mxfp8+output_mxfp8"
    assert content_hash(quant) != content_hash(shipped("linear_mxfp8"))
    alone = compose(["quant=bf16", "quant/output=nvfp4"], None, {}).quant
    assert alone.name == "output_nvfp4"


def test_hash_covers_meaning_and_not_the_name() -> None:
    quant = shipped("FA_mxfp8")
    other = copy.deepcopy(quant)
    other.name = "other"
    assert content_hash(other) == content_hash(quant)
    other.rules = [Rule(layers=[0], format="bf16")]
    assert content_hash(other) != content_hash(quant)
