"""The precision map: every slot of every module, and the effect of rules."""

from __future__ import annotations

import pytest

from quantexp.errors import ConfigError
from quantexp.memory.footprint import map_in_force
from quantexp.quant.precision import (
    Entry,
    ModuleId,
    check_rules,
    declared_maps,
    decoder_modules,
    distinct_slots,
    precision_map,
)
from quantexp.quant.records import entry_record, spec_record
from quantexp.quant.rules import changes
from quantexp.quant.sites import DGRAD_Q_K, FPROP_K, FPROP_X, WGRAD_G, WGRAD_X, Site
from quantexp.schema import ModelConfig, QuantConfig, Rule

MODEL = ModelConfig(
    name="m",
    num_layers=3,
    hidden_size=8,
    ffn_hidden_size=8,
    num_attention_heads=1,
    num_query_groups=1,
    head_dim=8,
)


def quant(*rules: Rule, linear: str = "mxfp8", qk: str | None = None) -> QuantConfig:
    config = QuantConfig(rules=list(rules))
    config.linear.format = linear
    config.qk.format = qk
    return config


def formats(config: QuantConfig, iteration: int = 1) -> dict[str, str]:
    """Label -> format."""
    declared = precision_map(MODEL, config, iteration)
    return {e.label: e.spec.fmt.name for module in declared.values() for e in module.entries()}


def changed(*rules: Rule, iteration: int = 1) -> set[str]:
    """The labels whose format the rules change."""
    before, after = formats(quant()), formats(quant(*rules), iteration)
    assert before.keys() == after.keys()
    return {label for label in after if after[label] != before[label]}


def test_decoder_has_five_modules_a_layer_in_forward_order() -> None:
    modules = decoder_modules(MODEL)
    assert [m.name for m, _ in modules[:5]] == ["qkv", "attention", "proj", "fc1", "fc2"]
    assert [m.layer for m, _ in modules] == [0] * 5 + [1] * 5 + [2] * 5
    assert dict(modules)[ModuleId(2, "attention")] == (Site.QK, Site.PV)
    assert dict(modules)[ModuleId(0, "fc1")] == (Site.LINEAR,)


def test_map_has_every_slot_once() -> None:
    entries = [e for m in precision_map(MODEL, quant()).values() for e in m.entries()]
    assert len(entries) == len({e.label for e in entries}) == 3 * (4 * 6 + 2 * 6)
    assert {e.slot.site for e in entries if e.spec.quantised} == {Site.LINEAR}


def test_labels_are_the_words_of_the_messages() -> None:
    module = precision_map(MODEL, quant())[ModuleId(0, "fc1")]
    entry = Entry(module.module, WGRAD_G, module.spec(WGRAD_G))
    assert entry.label == "layer 0 fc1 linear.wgrad.g"
    assert entry in list(module.entries())


def test_record_contains_everything_that_recomputing_needs() -> None:
    module = precision_map(MODEL, quant(linear="hifp8"))[ModuleId(1, "proj")]
    record = entry_record(next(module.entries()))
    assert record == {
        "layer": 1,
        "module": "proj",
        "site": "linear",
        "product": "fprop",
        "operand": "x",
        "format": "hifp8",
        "axis": "input_width",
        "block": None,
        "scale_rule": None,
        "rounding": "away",
        "scaling": "current",
        "saturate": True,
        "amax_target": 15.0,
        "reuse": False,
    }


def test_record_names_later_options_only_where_they_are_set() -> None:
    config = quant(linear="mxfp4")
    config.linear.rounding, config.linear.hadamard, config.linear.pre_scale = (
        "stochastic",
        "random",
        True,
    )
    record = entry_record(next(precision_map(MODEL, config)[ModuleId(0, "fc1")].entries()))
    assert {k: record[k] for k in ("rounding", "hadamard", "hadamard_block", "pre_scale")} == {
        "rounding": "stochastic",
        "hadamard": "random",
        "hadamard_block": 32,
        "pre_scale": True,
    }
    assert "window" not in record
    delayed = quant(linear="hifp8")
    delayed.linear.scaling = "delayed"
    assert (
        entry_record(next(precision_map(MODEL, delayed)[ModuleId(0, "fc1")].entries()))["window"]
        == 16
    )


def test_operands_that_depend_on_the_moment_know_their_slot() -> None:
    config = quant(linear="mxfp4", qk="mxfp4")
    config.linear.wgrad.g.rounding = "stochastic"
    config.qk.rounding = "stochastic"
    config.qk.dgrad_q.k.format = "reuse"
    declared = precision_map(MODEL, config)
    linear = declared[ModuleId(2, "fc1")]
    assert linear.spec(WGRAD_G).stream == "layer 2 fc1 linear.wgrad.g"
    assert linear.spec(WGRAD_X).stream == ""
    attention = declared[ModuleId(1, "attention")]
    forward = attention.spec(FPROP_K).stream
    assert forward == "layer 1 attention qk.fprop.k"
    assert attention.spec(DGRAD_Q_K).stream == forward


def test_modules_that_are_alike_share_their_operands() -> None:
    one_layer = Rule(layers=[1], format="mxfp4", sites=["linear"])
    declared = precision_map(MODEL, quant(one_layer))
    assert declared[ModuleId(0, "fc1")].slots is declared[ModuleId(2, "qkv")].slots
    assert declared[ModuleId(1, "fc1")].slots is declared[ModuleId(1, "qkv")].slots
    distinct = distinct_slots(declared)
    assert len(distinct) == 4, "linear and attention, within the rule's layer and outside"
    assert all(any(module.alike is slots for slots in distinct) for module in declared.values())


def test_modules_with_streams_of_their_own_are_alike_except_for_these() -> None:
    config = quant()
    config.linear.rounding = "stochastic"
    declared = precision_map(MODEL, config)
    first, second = (declared[ModuleId(layer, "fc1")] for layer in (0, 1))
    streams = [m.spec(FPROP_X).stream for m in (first, second)]
    assert streams == ["layer 0 fc1 linear.fprop.x", "layer 1 fc1 linear.fprop.x"]
    assert first.alike is second.alike
    assert first.alike == first.slots, "which a comparison leaves out"
    assert len(distinct_slots(declared)) == 2, "linear and attention"


def test_maps_of_a_run_apply_from_their_first_iteration() -> None:
    config = quant(Rule(iterations=[3, 4], format="bf16"))
    maps = declared_maps(MODEL, config)
    assert changes(config) == [1, 3, 5]
    assert maps == [precision_map(MODEL, config, i) for i in (1, 3, 5)]
    assert maps[0] != maps[1]
    in_force = [map_in_force(maps, config, i) for i in range(1, 7)]
    assert [maps.index(each) for each in in_force] == [0, 0, 1, 1, 0, 0], "the third is the first"
    assert in_force[4] is maps[2]


def test_a_rule_may_transform_one_product() -> None:
    rule = Rule(hadamard="deterministic", sites=["linear"], products=["wgrad"], layers=[0])
    declared = precision_map(MODEL, quant(rule, linear="mxfp4"))
    transformed = {e.label for m in declared.values() for e in m.entries() if e.spec.is_transformed}
    assert transformed == {
        f"layer 0 {module} linear.wgrad.{name}"
        for module in ("qkv", "proj", "fc1", "fc2")
        for name in "gx"
    }


def test_a_rule_that_transforms_only_one_operand_is_refused() -> None:
    rule = Rule(hadamard="random", operands=["g"], products=["wgrad"])
    with pytest.raises(ConfigError, match=r"quant\.linear\.wgrad must have the same hadamard"):
        precision_map(MODEL, quant(rule, linear="mxfp4"))


def test_rule_without_conditions_applies_everywhere() -> None:
    assert set(formats(quant(Rule(format="bf16"))).values()) == {"bf16"}


def test_later_rule_wins() -> None:
    first, later = Rule(format="mxfp4", sites=["linear"]), Rule(format="hifp8", modules=["fc1"])
    after = formats(quant(first, later))
    assert after["layer 0 fc1 linear.fprop.x"] == "hifp8"
    assert after["layer 0 fc2 linear.fprop.x"] == "mxfp4_e2m1"
    assert formats(quant(later, first))["layer 0 fc1 linear.fprop.x"] == "mxfp4_e2m1"


def test_rule_wins_over_the_slots_own_keys() -> None:
    config = quant(Rule(format="bf16", layers=[0]))
    config.linear.wgrad.g.format = "mxfp8_e5m2"
    after = formats(config)
    assert after["layer 0 qkv linear.wgrad.g"] == "bf16"
    assert after["layer 1 qkv linear.wgrad.g"] == "mxfp8_e5m2"


def test_rule_may_change_only_an_option() -> None:
    declared = precision_map(MODEL, quant(Rule(block=16, products=["wgrad"], sites=["linear"])))
    module = declared[ModuleId(0, "fc1")]
    assert module.spec(WGRAD_G).block == 16
    assert module.spec(FPROP_X).block == 32


def test_option_of_a_rule_skips_slots_in_the_working_precision() -> None:
    declared = precision_map(MODEL, quant(Rule(block=16)))
    specs = [e.spec for m in declared.values() for e in m.entries()]
    assert {spec.block for spec in specs if spec.quantised} == {16}
    assert {spec_record(spec)["block"] for spec in specs if not spec.quantised} == {None}


def test_negative_layers_count_from_the_end() -> None:
    labels = changed(Rule(format="bf16", layers=[0, -1]))
    assert {label.split()[1] for label in labels} == {"0", "2"}


def test_module_patterns_are_the_shells() -> None:
    labels = changed(Rule(format="bf16", modules=["fc?", "pr*"]))
    assert {label.split()[2] for label in labels} == {"fc1", "fc2", "proj"}


def test_products_and_operands_narrow_a_rule() -> None:
    rule = Rule(format="bf16", products=["dgrad", "wgrad"], operands=["g"])
    assert {label.split()[3] for label in changed(rule)} == {"linear.dgrad.g", "linear.wgrad.g"}


def test_sites_narrow_a_rule() -> None:
    labels = changed(Rule(format="mxfp4", sites=["pv"], layers=[1]))
    assert {label.split()[3].split(".")[0] for label in labels} == {"pv"}
    assert len(labels) == 6


def test_all_conditions_must_hold() -> None:
    rule = Rule(format="bf16", layers=[1], modules=["fc1"], products=["fprop"], operands=["w"])
    assert changed(rule) == {"layer 1 fc1 linear.fprop.w"}


def test_rule_that_quantises_the_forward_reaches_its_reuse() -> None:
    config = quant(Rule(format="mxfp4", products=["fprop"], sites=["qk"]), qk="mxfp8")
    config.qk.dgrad_q.k.format = "reuse"
    spec = precision_map(MODEL, config)[ModuleId(0, "attention")].spec(DGRAD_Q_K)
    assert (spec.fmt.name, spec.reuse) == ("mxfp4_e2m1", True)


@pytest.mark.parametrize(
    ("iterations", "applies"),
    [
        ([2, 4], [False, True, True, True, False]),
        ([3, None], [False, False, True, True, True]),
        ([1, 1], [True, False, False, False, False]),
        ([], [True] * 5),
    ],
)
def test_iterations_are_a_closed_range(iterations: list[int | None], applies: list[bool]) -> None:
    rule = Rule(format="bf16", iterations=iterations)
    assert [bool(changed(rule, iteration=i)) for i in range(1, 6)] == applies


def test_changes_are_where_rules_begin_and_end() -> None:
    assert changes(quant()) == [1]
    assert changes(quant(Rule(format="bf16"))) == [1]
    rules = Rule(iterations=[1, 100]), Rule(iterations=[50, None]), Rule(iterations=[50, 60])
    assert changes(quant(*rules)) == [1, 50, 61, 101]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(sites=["ffn"]), "[0].sites must be among linear, qk, pv, output, norm, got 'ffn'"),
        (
            Rule(products=["bprop"]),
            "[0].products must be among fprop, dgrad, wgrad, dgrad_q, dgrad_k, dgrad_p, dgrad_v, "
            "got 'bprop'",
        ),
        (
            Rule(operands=["s"]),
            "[0].operands must be among P, dO, dS, g, k, q, v, w, x, y, got 's'",
        ),
        (Rule(layers=[0, 3]), "[0].layers must lie between -3 and 2 for 3 layers, got 3"),
        (Rule(layers=[-4]), "[0].layers must lie between -3 and 2 for 3 layers, got -4"),
        (
            Rule(modules=["fc3"]),
            "[0].modules must match one of qkv, attention, proj, fc1, fc2, attention-norm, mlp-norm, "
            "final-norm, output, got 'fc3'",
        ),
        (Rule(iterations=[1]), "[0].iterations must be [first, last], iterations from 1, got [1]"),
        (
            Rule(iterations=[None, 2]),
            "[0].iterations must be [first, last], iterations from 1, got [None, 2]",
        ),
        (
            Rule(iterations=[0, 2]),
            "[0].iterations must be [first, last] with 1 <= first <= last, got [0, 2]",
        ),
        (
            Rule(iterations=[3, 2]),
            "[0].iterations must be [first, last] with 1 <= first <= last, got [3, 2]",
        ),
    ],
)
def test_rule_that_cannot_apply_is_refused(rule: Rule, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules(MODEL, quant(rule))
    assert str(caught.value) == f"quant.rules{message}"


def test_refused_rule_is_named_by_its_index() -> None:
    with pytest.raises(ConfigError, match=r"quant\.rules\[1\]\.sites must be among"):
        check_rules(MODEL, quant(Rule(), Rule(sites=["x"])))


def test_option_of_a_rule_that_the_slot_lacks_names_the_rule() -> None:
    with pytest.raises(ConfigError, match=r"quant\.rules\[0\]\.scaling does not apply to mxfp8_e"):
        precision_map(MODEL, quant(Rule(scaling="none", sites=["linear"])))


def test_lookup_is_no_product_of_a_rule() -> None:
    with pytest.raises(ConfigError, match="dgrad_p, dgrad_v, got 'lookup'"):
        check_rules(MODEL, quant(Rule(products=["lookup"])))
