"""What a run quantises in its own iterations, and the name of its scheme that follows from it.

A rule whose iterations lie outside of the run changes nothing in it, and a site whose slots all stay in the working
precision, or in a format that has all of its values, is not in the name. Needs no torch.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

from quantexp.config.evaluation import map_iteration
from quantexp.errors import ConfigError
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Family, Format
from quantexp.quant.outside_products import state_slots
from quantexp.quant.precision import PrecisionMap, configured, forward_only, precision_map
from quantexp.quant.rules import changes, fill_shares, variants
from quantexp.quant.scheme import InForce, derived_name
from quantexp.quant.sites import Site
from quantexp.schema import Experiment, QuantConfig
from quantexp.schema.training import Precision

#: Stored mantissa bits, smallest normal and largest exponent of the working precisions (IEEE 754; bfloat16).
_FLOATS = {
    Precision.bf16: (7, -126, 127),
    Precision.fp16: (10, -14, 15),
    Precision.fp32: (23, -126, 127),
}


def iterations_of(experiment: Experiment) -> tuple[int, int]:
    """The first and the last iteration, from 1, whose maps are in force; of an evaluation the checkpoint's alone."""
    if experiment.evaluate.only:
        return (map_iteration(experiment),) * 2
    return experiment.first_iteration, experiment.training.last_iteration


def maps_between(experiment: Experiment, first: int, last: int) -> list[PrecisionMap]:
    """The precision maps from an iteration to a later one, in order, then those under conditions of rules."""
    return [
        precision_map(experiment.model, quant, iteration)
        for quant in (experiment.quant, *variants(experiment.quant))
        for iteration in (first, *(i for i in changes(quant) if first < i <= last))
    ]


def _maps(experiment: Experiment, quant: QuantConfig) -> list[PrecisionMap]:
    """The different maps of a run's own iterations under a scheme, in order; of an evaluation, its forward pass."""
    maps = maps_between(replace(experiment, quant=quant), *iterations_of(experiment))
    if experiment.evaluate.only:
        maps = [forward_only(each) for each in maps]
    return [each for i, each in enumerate(maps) if not i or each != maps[i - 1]]


def sites_in_force(experiment: Experiment) -> InForce:
    """The sites that a run changes in its own iterations, with formats; of an evaluation, in its forward pass."""
    formats: dict[Site, frozenset[Format]] = {}
    for declared in _maps(experiment, experiment.quant):
        for name, module in declared.items():
            for slot, spec in module.slots.items():
                is_quantised = spec.quantised and not _keeps(spec, experiment.training.precision)
                if is_quantised or not spec.softmax.is_stock:
                    site = configured(name.name, slot).site
                    own = {spec.fmt} if is_quantised else set()
                    formats[site] = formats.get(site, frozenset()) | own
    return formats


def _keeps(spec: QuantSpec, precision: Precision) -> bool:
    """Whether quantisation keeps every value of a working precision, as that to bfloat16 does in bf16."""
    mantissa_bits, emin, emax = _FLOATS[precision]
    element = (
        spec.fmt.element
    )  # that of hifloat8 has fewer mantissa bits than any working precision
    is_plain = not (
        spec.fmt.block or spec.is_scaled or spec.is_transformed or spec.is_pre_scaled or spec.parts
    )
    return (
        is_plain
        and not element.values
        and spec.fmt.family is not Family.PYTHON
        and element.mantissa_bits >= mantissa_bits
        and element.emin - element.mantissa_bits <= emin - mantissa_bits
        and element.emax >= emax
    )


def rules_out_of_force(experiment: Experiment) -> list[int]:
    """The indices of the rules whose iterations lie outside of the run."""
    first, last = iterations_of(experiment)
    return [
        index
        for index, rule in enumerate(experiment.quant.rules)
        for begin, end in (rule.iterations or (1, None),)
        if (begin or 1) > last or (end is not None and end < first)
    ]


def idle_rules(experiment: Experiment) -> str | None:
    """The rules whose iterations lie outside of the run, in words; None if there are none."""
    first, last = iterations_of(experiment)
    names = ", ".join(f"quant.rules[{index}]" for index in rules_out_of_force(experiment))
    return f"never in force in iterations {first} to {last}: {names}" if names else None


def name_in_force(experiment: Experiment, sites: InForce) -> str:
    """The derived name of what a run quantises, without rules that change nothing; `sites` are its `sites_in_force`."""
    return derived_name(without_idle_rules(experiment, experiment.quant), sites)


def without_idle_rules(experiment: Experiment, quant: QuantConfig) -> QuantConfig:
    """A scheme without the rules that would change nothing in a run."""
    quant = replace(quant, rules=copy.deepcopy(quant.rules))
    fill_shares(quant, experiment.training.iterations)
    idle = rules_out_of_force(replace(experiment, quant=quant))
    quant = replace(quant, rules=[r for index, r in enumerate(quant.rules) if index not in idle])
    whole = _maps(experiment, quant) if quant.rules else []
    for rule in quant.rules:
        fewer = replace(quant, rules=[each for each in quant.rules if each is not rule])
        with contextlib.suppress(ConfigError):  # without the rule it may be no scheme
            if _maps(experiment, fewer) == whole:
                quant = fewer
    return quant


def quantises(experiment: Experiment, sites: InForce) -> bool:
    """Whether a run quantises an operand, or in training a moment or a gradient between ranks."""
    return bool(sites) or (not experiment.evaluate.only and bool(state_slots(experiment.quant)))
