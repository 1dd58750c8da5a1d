"""What of attention's softmax a scheme multiplies: names, rules, maps and paths of attention."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.formats.types import STOCK, Delta, Softmax
from quantexp.launch.identity import identity
from quantexp.proof.declaration import Declaration
from quantexp.quant.precision import Entry, ModuleId, precision_map
from quantexp.quant.records import entry_record
from quantexp.quant.scheme import content_hash
from quantexp.quant.sites import DGRAD_V_P, FPROP_P
from quantexp.schema import Experiment

RAISED = "quant.pv={unnormalised: true, max_factor: 2, delta: o}"
NOT_REUSED = ("quant.pv.dgrad_v.P.format=mxfp8",)
LAYER_1 = "quant.rules=[{layers: [1], unnormalised: true}]"


def tiny(*words: str) -> Experiment:
    return compose(["training=fast", *words], None, {})


def of_layer(experiment: Experiment, layer: int, iteration: int = 1) -> Softmax:
    declared = precision_map(experiment.model, experiment.quant, iteration)
    return declared[ModuleId(layer, "attention")].spec(FPROP_P).softmax


def test_options_of_the_site_are_those_of_p_alone() -> None:
    experiment = tiny("quant=bf16", RAISED)
    declared = precision_map(experiment.model, experiment.quant)[ModuleId(0, "attention")]
    assert declared.is_quantised
    assert declared.spec(FPROP_P).softmax == Softmax(True, 2.0, Delta.O)
    assert declared.spec(DGRAD_V_P).softmax == STOCK
    record = entry_record(Entry(declared.module, FPROP_P, declared.spec(FPROP_P)))
    assert {key: record[key] for key in ("format", "unnormalised", "max_factor", "delta")} == {
        "format": "bf16",
        "unnormalised": True,
        "max_factor": 2.0,
        "delta": "o",
    }
    other = entry_record(Entry(declared.module, DGRAD_V_P, declared.spec(DGRAD_V_P)))
    assert not other.keys() & {"unnormalised", "max_factor", "delta"}


def test_options_do_not_depend_on_the_format_and_rules_come_first() -> None:
    rules = "quant.rules=[{layers: [1], format: bf16}, {iterations: [2, 2], unnormalised: false}]"
    experiment = tiny("quant=bf16", "quant/pv=mxfp8", *NOT_REUSED, RAISED, rules)
    assert of_layer(experiment, 1) == of_layer(experiment, 0) == Softmax(True, 2.0, Delta.O)
    assert of_layer(experiment, 0, 2) == Softmax(False, None, Delta.O), "the factor goes with it"
    declaration = Declaration(experiment.quant, experiment.model.num_layers)
    for iteration in (1, 2, 3):
        declared = precision_map(experiment.model, experiment.quant, iteration)
        assert declaration.differences(declared, iteration) == []


def test_one_layer_may_have_it() -> None:
    experiment = tiny("quant=bf16", LAYER_1)
    assert of_layer(experiment, 0) == STOCK
    assert of_layer(experiment, 1) == Softmax(unnormalised=True)


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["quant=bf16", "quant.pv.unnormalised=true"], "pv_custom~"),
        (["quant=bf16", "quant.pv.delta=o"], "pv_custom~"),
        (["quant=bf16", LAYER_1], "rules~"),
        (["quant=linear_mxfp8", RAISED], "linear_mxfp8+pv_custom~"),
        (["quant=more/FA_bf16_flash"], "FA_bf16_flash"),
        (["quant=more/FA_bf16_flash_raised_max"], "FA_bf16_flash_raised_max"),
        (["quant=bf16", "quant.pv.unnormalised=false"], "bf16"),
    ],
)
def test_a_scheme_is_named_after_it(words: list[str], start: str) -> None:
    name = str(tiny(*words).quant.name)
    assert name.startswith(start)
    assert name == start or start.endswith("~")


def test_it_is_part_of_the_meaning_and_the_identity() -> None:
    schemes: tuple[list[str], ...] = (
        [],
        ["quant.pv.unnormalised=true"],
        ["quant.pv.delta=o"],
        [RAISED],
        [LAYER_1],
    )
    experiments = [tiny("quant=bf16", *words) for words in schemes]
    assert len({content_hash(each.quant) for each in experiments}) == len(schemes)
    identities = {json.dumps(identity(each, "cpu"), default=str) for each in experiments}
    assert len(identities) == len(schemes)


@pytest.mark.parametrize("words", [["quant.pv.unnormalised=true"], ["quant.pv.delta=o"]])
def test_the_fused_kernel_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny("quant=bf16", "training.attention=fused", *words)
    assert str(caught.value) == (
        "training.attention=fused cannot hold layer 0 attention pv.fprop.P as P with unnormalised or delta: the kernel "
        "multiplies q, k and v the same way forward and backward, all else in high precision; use "
        "training.attention=tiled or plain"
    )


@pytest.mark.parametrize("factor", [1.0, 65, -2])
def test_a_factor_that_raises_nothing_is_refused(factor: Any) -> None:
    with pytest.raises(ConfigError, match="must be above 1 and at most 64, got"):
        tiny("quant=bf16", f"quant.pv={{unnormalised: true, max_factor: {factor}}}")
