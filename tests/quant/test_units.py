"""Units cover every quantised slot once, and their rules turn exactly them to the working precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from quantexp.errors import ConfigError
from quantexp.quant.precision import PrecisionMap, precision_map
from quantexp.quant.units import Unit, aspects_of, key_of, units_of, working_rules
from quantexp.schema import Aspect, Experiment, Rule

Tiny = Callable[..., Experiment]
EVERY = [[aspect] for aspect in Aspect] + [
    [Aspect.layer, Aspect.slot],
    [Aspect.module, Aspect.slot],
]
SCHEMES = (
    ("quant=FA_linear_mxfp4",),
    (
        "quant=more/FA_full_mxfp8",
        "quant/pv=mxfp8",
        "quant/output=mxfp8",
        "training.attention=tiled",
    ),
    ("quant=more/linear_mxfp4_sr_rht",),
    ("quant=more/linear_nvfp4_recipe", "model.num_layers=7"),
    ("quant=more/linear_mxfp4_quartet",),
    ("quant=more/linear_mxfp4_quest",),
    ("quant=linear_mxfp4", "quant.linear.of=forward"),
    ("quant=linear_mxfp8", "quant.linear.of=mxfp4"),
    ("quant=more/linear_mxfp8_floor_norms", "quant.norm.fprop.y.format=mxfp8"),
)


def without(experiment: Experiment, units: list[Unit]) -> PrecisionMap:
    quant = experiment.quant
    changed = dataclasses.replace(quant, rules=[*quant.rules, *working_rules(units)])
    return precision_map(experiment.model, changed)


def quantised(declared: PrecisionMap) -> set[tuple[str, str]]:
    return {
        (str(module.module), str(entry.slot))
        for module in declared.values()
        for entry in module.entries()
        if entry.spec.quantised
    }


@pytest.mark.parametrize("words", SCHEMES, ids=lambda words: words[0])
@pytest.mark.parametrize("aspects", EVERY, ids=lambda aspects: "+".join(a.name for a in aspects))
def test_rules_turn_off_exactly_the_slots_of_a_unit(
    words: tuple[str, ...], aspects: list[Aspect], tiny: Tiny
) -> None:
    experiment = tiny(*words)
    whole = precision_map(experiment.model, experiment.quant)
    units = units_of([whole], aspects)
    assert len(units) == len(set(units)) > 0
    everything = quantised(whole)
    turned_off = []
    for unit in units:
        left = without(experiment, [unit])
        turned_off.append(everything - quantised(left))
        kept = {
            (str(m.module), str(e.slot)): e.spec
            for m in left.values()
            for e in m.entries()
            if e.spec.quantised
        }
        before = {(str(m.module), str(e.slot)): e.spec for m in whole.values() for e in m.entries()}
        assert all(before[place] == spec for place, spec in kept.items())
    assert all(turned_off)
    assert sum(map(len, turned_off)) == len(everything) == len(set().union(*turned_off))
    assert not quantised(without(experiment, units))


def test_units_have_the_words_of_messages(tiny: Tiny) -> None:
    experiment = tiny("quant=FA_linear_mxfp4", "quant/output=mxfp4")
    declared = [precision_map(experiment.model, experiment.quant)]

    def words(*aspects: Aspect) -> list[str]:
        return [str(unit) for unit in units_of(declared, aspects)]

    assert words(Aspect.layer) == ["layer 0", "layer 1", "output layer"]
    assert words(Aspect.module)[-2:] == ["layer 1 fc2", "output layer"]
    assert words(Aspect.site) == ["linear", "qk", "output"]
    assert words(Aspect.slot)[:3] == ["linear.fprop.x", "linear.fprop.w", "linear.dgrad.g"]
    assert "output.wgrad.x" in words(Aspect.slot)
    with_norms = tiny("quant=more/linear_mxfp8_floor_norms")
    of_norms = units_of([precision_map(with_norms.model, with_norms.quant)], [Aspect.layer])
    assert list(map(str, of_norms)) == ["layer 0", "layer 1", "final-norm"]
    assert words(Aspect.layer, Aspect.slot)[0] == "layer 0 linear.fprop.x"
    assert words(Aspect.layer, Aspect.slot)[-1] == "output layer output.wgrad.x"


def test_a_forward_copy_stays_with_its_forward_slot(tiny: Tiny) -> None:
    experiment = tiny("quant=FA_mxfp8")
    declared = [precision_map(experiment.model, experiment.quant)]
    units = [str(unit) for unit in units_of(declared, [Aspect.slot])]
    assert units == ["qk.fprop.q + dgrad_k.q", "qk.fprop.k + dgrad_q.k"]


def test_transformed_operands_of_a_product_stay_together(tiny: Tiny) -> None:
    experiment = tiny("quant=more/linear_mxfp4_hadamard")
    declared = [precision_map(experiment.model, experiment.quant)]
    units = [str(unit) for unit in units_of(declared, [Aspect.slot])]
    assert any(" + " in unit for unit in units)
    for unit in units_of(declared, [Aspect.slot]):
        without(experiment, [unit])  # a half of a transform would be refused


def test_rules_are_merged(tiny: Tiny) -> None:
    experiment = tiny("quant=linear_mxfp4")
    declared = [precision_map(experiment.model, experiment.quant)]
    units = units_of(declared, [Aspect.layer, Aspect.slot])
    first = [unit for unit in units if str(unit).startswith("layer 0 linear.fprop")]
    (rule,) = working_rules(first)
    assert (rule.layers, rule.sites, rule.products, rule.operands, rule.format) == (
        [0],
        ["linear"],
        ["fprop"],
        ["x", "w"],
        "bf16",
    )


def test_bf16_has_no_units(tiny: Tiny) -> None:
    experiment = tiny("quant=bf16")
    assert units_of([precision_map(experiment.model, experiment.quant)], [Aspect.slot]) == []


def test_a_key_of_no_aspect_is_everything(tiny: Tiny) -> None:
    experiment = tiny("quant=linear_mxfp4")
    declared = precision_map(experiment.model, experiment.quant)
    entry = next(entry for module in declared.values() for entry in module.entries())
    rule = key_of(entry, []).rule()
    assert rule == Rule(format="bf16")


def test_an_unknown_aspect_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="--by must be among slot, product, site, module, layer, got 'head'"
    ):
        aspects_of(["slot", "head"], "--by")
