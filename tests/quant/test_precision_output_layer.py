"""The output layer and a tied embedding in the precision map, and the rules that cover them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantexp.errors import ConfigError
from quantexp.quant.precision import (
    ModuleId,
    check_rules,
    forward_only,
    precision_map,
    unquantised,
)
from quantexp.quant.records import entry_record
from quantexp.quant.sites import FPROP_W
from quantexp.schema import QuantConfig, Rule

from .test_precision import MODEL, quant

TIED = replace(MODEL, tie_embeddings=True)


OUTPUT, EMBEDDING = ModuleId(3, "output"), ModuleId(3, "embedding")


def with_output(*rules: Rule, fmt: str | None = "mxfp8") -> QuantConfig:
    """Linear layers in mxfp8, and the output layer in a format."""
    config = quant(*rules)
    config.output.format = fmt
    return config


def output_formats(config: QuantConfig, iteration: int = 1) -> set[str]:
    """The formats of the output layer's slots; empty if it is not in the map."""
    module = precision_map(MODEL, config, iteration).get(OUTPUT)
    return set() if module is None else {entry.spec.fmt.name for entry in module.entries()}


def test_output_layer_is_the_last_module_with_the_slots_of_a_linear_layer() -> None:
    declared = precision_map(MODEL, with_output())
    assert list(declared)[-1] == OUTPUT
    assert declared[OUTPUT].is_linear
    assert declared[OUTPUT].slots == declared[ModuleId(0, "fc1")].slots
    assert str(OUTPUT) == "output layer"
    entry = next(declared[OUTPUT].entries())
    assert entry.label == "output layer output.fprop.x"
    names = ("layer", "module", "site", "product", "operand")
    assert [entry_record(entry)[name] for name in names] == [3, "output", "output", "fprop", "x"]


def test_output_layer_that_is_not_quantised_is_not_in_the_map() -> None:
    for config in (quant(), with_output(fmt="bf16"), quant(Rule(sites=["output"], format="bf16"))):
        assert OUTPUT not in precision_map(TIED, config)
        assert EMBEDDING not in precision_map(TIED, config)


def test_tied_embedding_has_the_weight_of_the_forward_product() -> None:
    config = with_output()
    config.output.fprop.w.format = "mxfp4"
    config.output.rounding = "stochastic"
    config.output.fprop.w.rounding = "stochastic"
    declared = precision_map(TIED, config)
    (entry,) = declared[EMBEDDING].entries()
    assert entry.spec == declared[OUTPUT].spec(FPROP_W)
    assert entry.spec.stream == "output layer output.fprop.w"
    assert entry.label == "embedding output.lookup.w"
    assert entry_record(entry)["site"] == "output"
    assert EMBEDDING not in precision_map(MODEL, config)
    assert list(forward_only(declared)[EMBEDDING].entries()) == [entry]


def test_unquantised_map_has_the_same_slots() -> None:
    declared = precision_map(TIED, with_output())
    plain = unquantised(declared)
    assert {name: list(module.slots) for name, module in plain.items()} == {
        name: list(module.slots) for name, module in declared.items()
    }
    assert not any(module.is_quantised for module in plain.values())


@pytest.mark.parametrize("option", ["hadamard", "pre_scale"])
def test_weight_of_a_tied_embedding_is_not_transformed(option: str) -> None:
    config = with_output(fmt="mxfp4")
    setattr(config.output, option, True if option == "pre_scale" else "random")
    with pytest.raises(ConfigError, match=rf"^quant.output.fprop.w must have no {option} in a mod"):
        precision_map(TIED, config)
    assert precision_map(MODEL, config)[OUTPUT].is_quantised


@pytest.mark.parametrize(
    "rule",
    [
        Rule(sites=["output"], format="mxfp4"),
        Rule(modules=["output"], format="mxfp4"),
        Rule(modules=["output", "fc1"], format="mxfp4"),
        Rule(sites=["linear", "output"], modules=["*"], format="mxfp4"),
    ],
)
def test_rule_that_names_the_output_layer_quantises_it(rule: Rule) -> None:
    assert output_formats(quant(rule)) == {"mxfp4_e2m1"}


@pytest.mark.parametrize(
    "rule", [Rule(format="mxfp4"), Rule(modules=["*"], format="mxfp4"), Rule(modules=["out*"])]
)
def test_rule_that_does_not_name_it_covers_it_only_where_it_is_quantised(rule: Rule) -> None:
    assert output_formats(quant(rule)) == set()
    covered = {"mxfp4_e2m1"} if rule.format else {"mxfp8_e4m3"}
    assert output_formats(with_output(rule)) == covered
    named = Rule(sites=["output"], format="mxfp8")
    assert output_formats(quant(named, rule)) == covered


@pytest.mark.parametrize(
    "rule",
    [
        Rule(sites=["linear", "qk", "pv"], format="mxfp4"),
        Rule(layers=[-1], format="mxfp4"),
        Rule(layers=[0, 1, 2], format="mxfp4"),
        Rule(modules=["fc?"], format="mxfp4"),
    ],
)
def test_rule_for_the_decoder_does_not_cover_the_output_layer(rule: Rule) -> None:
    assert output_formats(with_output(rule)) == {"mxfp8_e4m3"}


def test_rule_of_the_output_layer_leaves_the_decoder_as_it_is() -> None:
    declared = precision_map(MODEL, with_output(Rule(sites=["output"], format="mxfp4")))
    assert {e.spec.fmt.name for m, p in declared.items() if m != OUTPUT for e in p.entries()} == {
        "mxfp8_e4m3",
        "bf16",
    }


def test_warm_up_includes_the_output_layer() -> None:
    config = with_output(Rule(iterations=[1, 2], format="bf16"))
    assert output_formats(config, 2) == {"bf16"}
    assert output_formats(config, 3) == {"mxfp8_e4m3"}


@pytest.mark.parametrize(
    "rule",
    [
        Rule(layers=[-1], sites=["output"], format="mxfp8"),
        Rule(layers=[-1], modules=["output"], format="mxfp8"),
    ],
)
def test_rule_for_layers_of_the_output_layer_is_refused(rule: Rule) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules(MODEL, quant(rule))
    assert str(caught.value) == (
        "quant.rules[0].layers are layers of the decoder, and the output layer is none of them, got [-1]; remove layers"
    )
