"""The configuration read a second time agrees with the map, and names what a map has else.

`tests/test_conf.py` compares the two for every shipped scheme.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantexp.config.compose import compose
from quantexp.formats.spec import get_format
from quantexp.proof.declaration import Declaration
from quantexp.quant.precision import ModuleId, ModulePrecision, PrecisionMap, precision_map
from quantexp.quant.rules import changes
from quantexp.quant.sites import FPROP_X, WGRAD_G
from quantexp.schema import Rule

_RULES = [
    Rule(format="mxfp6_e3m2", modules=["fc*", "out*"], rounding="stochastic"),
    Rule(format="mxfp4", scale_rule="even", operands=["w"], layers=[-1]),
    Rule(format="fp8_e4m3", scaling="delayed", sites=["linear"], products=["fprop"]),
    Rule(format="bf16", iterations=[3, None], sites=["linear", "output"]),
]


@pytest.mark.parametrize("output", ["none", "mxfp8", "hifp8"])
def test_rules_and_a_tied_output_layer_are_read_as_the_map_has_them(output: str) -> None:
    experiment = compose(["model=tiny", "quant=bf16", f"quant/output={output}"])
    for rules in ([], _RULES[:1], _RULES[1:3], _RULES[:1] + _RULES[3:]):
        experiment.quant.rules = rules
        declaration = Declaration(experiment.quant, experiment.model.num_layers)
        for iteration in changes(experiment.quant):
            declared = precision_map(experiment.model, experiment.quant, iteration)
            assert declaration.differences(declared, iteration) == []


def _changed(slot: object, **options: object) -> tuple[Declaration, PrecisionMap]:
    experiment = compose(["model=tiny", "quant=FA_linear_mxfp8", "quant/output=mxfp8"])
    declared = precision_map(experiment.model, experiment.quant)
    name = ModuleId(1, "fc1")
    slots = {
        each: replace(spec, **options) if each == slot else spec  # type: ignore[arg-type]
        for each, spec in declared[name].slots.items()
    }
    declared[name] = ModulePrecision(name, slots)
    return Declaration(experiment.quant, experiment.model.num_layers), declared


def test_another_format_and_another_option_are_named_with_their_slot() -> None:
    declaration, declared = _changed(WGRAD_G, fmt=get_format("mxfp8_e5m2"))
    words = "layer 1 fc1 linear.wgrad.g: configured as mxfp8_e4m3, and the map has mxfp8_e5m2"
    assert declaration.differences(declared, 1) == [words]
    declaration, declared = _changed(FPROP_X, block=16)
    words = "layer 1 fc1 linear.fprop.x: configured with block 32, and the map has 16"
    assert declaration.differences(declared, 1) == [words]


def test_slots_and_an_output_layer_that_the_map_lacks_are_named() -> None:
    declaration, declared = _changed(None)
    name = ModuleId(1, "fc1")
    declared[name] = ModulePrecision(name, {})
    output = ModuleId(declaration.num_layers, "output")
    del declared[output]
    assert declaration.differences(declared, 1) == [
        "layer 1 fc1 linear.fprop.x: configured as mxfp8_e4m3, and the map lacks it",
        "output layer: it is configured to be quantised, and the map lacks it",
    ]


def test_a_map_that_outlives_its_rule_is_named() -> None:
    experiment = compose(["model=tiny", "quant=FA_linear_mxfp8"])
    experiment.quant.rules = [Rule(format="bf16", iterations=[1, 2])]
    declaration = Declaration(experiment.quant, experiment.model.num_layers)
    declared = precision_map(experiment.model, experiment.quant)
    assert declaration.differences(declared, 2) == []
    assert (
        "configured as mxfp8_e4m3, and the map has bf16" in declaration.differences(declared, 3)[0]
    )
