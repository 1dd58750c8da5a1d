"""What the configuration declares, read a second time, and what a precision map has instead.

The map is built by `quantexp.quant`; nothing that resolves a setting there is called here. Settings of a slot are, the
strongest first,

    the rules in force that cover it, the last one first      the slot's own keys      the site's keys

The first that names a format chooses it. Options are those of the settings before the first that names another format,
and else the defaults of the scheme: rceil for mxfp8, one current scale for hifp8, a window of 16 for delayed scales.
Wrong settings are not looked for: no such run begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.spec import Part, QuantSpec, get_format
from quantexp.formats.types import (
    Axis,
    Family,
    Format,
    Hadamard,
    Rounding,
    ScaleRule,
    Scaling,
    Take,
)
from quantexp.model.decoder import ATTENTION, EMBEDDING, FINAL_NORM, OUTPUT, is_norm
from quantexp.proof.softmax import declared_softmax
from quantexp.quant.precision import ModuleId, PrecisionMap
from quantexp.quant.records import part_record, part_words
from quantexp.quant.sites import FPROP_W, LOOKUP_W, Operand, Product, Site, Slot, slots_of
from quantexp.schema import QuantConfig, Rule, When

#: Words that stand for no format: the working precision, and the forward copy.
_HIGH, _COPY = "bf16", "reuse"
#: In place of the format of a part that is not multiplied.
_LEFT_OUT = "none"
_GRADIENTS = (Operand.G, Operand.DS, Operand.DO)


@dataclass
class Declaration:
    """The scheme of a run, and the schemes of modules that have others."""

    quant: QuantConfig
    #: Layers of the decoder, on all ranks.
    num_layers: int
    of_module: Mapping[ModuleId, QuantConfig] = field(default_factory=dict)

    #: Of the training, which rules with a share of it follow; None leaves them their recorded iterations.
    num_iterations: int | None = None

    #: The map that was right last, and the rules that were in force then.
    _right: tuple[PrecisionMap, list[Rule]] | None = field(default=None, repr=False)
    #: Of rules with conditions: the latest values, and the iteration that met the condition.
    _values: dict[int, list[float]] = field(default_factory=dict, repr=False)
    _met: dict[int, int] = field(default_factory=dict, repr=False)

    def see(self, line: Mapping[str, Any]) -> None:
        """Take the metrics of an iteration, on which conditions of rules depend."""
        for number, rule in enumerate(self.quant.rules):
            if rule.when is None or number in self._met:
                continue
            value = line.get(rule.when.measure.value)
            if value is None or not math.isfinite(value):
                continue
            self._values[number] = [*self._values.get(number, []), value][-rule.when.over :]
            if line["iteration"] >= rule.when.after and _meets(rule.when, self._values[number]):
                self._met[number] = line["iteration"]

    def differences(
        self, declared: PrecisionMap, iteration: int, *, quantised: bool = True
    ) -> list[str]:
        """What the map of an iteration has instead of what is configured: of each module the first slot, in words.

        `quantised`: under the scheme; otherwise the map must quantise nothing.
        """
        if not quantised:
            return Declaration(QuantConfig(), self.num_layers)._differences(declared, iteration)
        schemes = (self.quant, *self.of_module.values())
        in_force = [r for quant in schemes for r in quant.rules if self._applies(r, iteration)]
        if self._right is not None and self._right[0] is declared and self._right[1] == in_force:
            return []
        words = self._differences(declared, iteration)
        self._right = None if words else (declared, in_force)
        return words

    def _differences(self, declared: PrecisionMap, iteration: int) -> list[str]:
        known: dict[object, dict[Slot, QuantSpec]] = {}
        words = []
        for name, module in declared.items():
            quant = self.of_module.get(name, self.quant)
            rules = [
                rule
                for rule in quant.rules
                if self._applies(rule, iteration) and self._names(rule, name)
            ]
            key = id(quant), _sites(name), tuple(map(id, rules))
            if key not in known:
                known[key] = _resolved(quant, _sites(name), rules)
            for slot, spec in known[key].items():
                own = _slot_of(name, slot)
                if own is None:
                    continue
                wrong = _difference(module.slots.get(own), _with_stream(name, slot, spec))
                if wrong:
                    words.append(f"{name} {slot}: {wrong}")
                    break
        for beside, site in ((OUTPUT, Site.OUTPUT), (FINAL_NORM, Site.NORM)):
            name = ModuleId(self.num_layers, beside)
            if name not in declared and self._quantises(site):
                words.append(f"{name}: it is configured to be quantised, and the map lacks it")
        return words

    def _applies(self, rule: Rule, iteration: int) -> bool:
        """Whether a rule is in force: in its share of the training, or after the iteration that met its condition."""
        if rule.share and self.num_iterations is not None:
            first, last = (round(share * self.num_iterations) for share in rule.share)
            return first < iteration <= (last if rule.share[1] < 1 else iteration)
        if rule.when is None:
            return _is_in_force(rule, iteration)
        number = next(n for n, own in enumerate(self.quant.rules) if own is rule)
        return number in self._met and iteration > self._met[number]

    def _names(self, rule: Rule, name: ModuleId) -> bool:
        """Whether a rule names a module; those of the embedding are the output layer's."""
        layers = {layer % self.num_layers for layer in rule.layers}
        module = OUTPUT if name.name == EMBEDDING else name.name
        return (not layers or name.layer in layers) and (
            not rule.modules or any(fnmatchcase(module, each) for each in rule.modules)
        )

    def _quantises(self, site: Site) -> bool:
        """Whether the own keys of a site, the output layer's or the norms', name a format."""
        resolved = _resolved(self.quant, (site,), [])
        return any(spec.quantised for spec in resolved.values())


def _meets(when: When, values: Sequence[float]) -> bool:
    """Whether the latest values meet a condition."""
    mean = math.fsum(values) / len(values)
    bounds = when.below, when.above
    is_beyond = [b is not None and (mean < b, mean > b)[n] for n, b in enumerate(bounds)]
    return len(values) == when.over and any(is_beyond)


def _is_in_force(rule: Rule, iteration: int) -> bool:
    first, last = rule.iterations or (1, None)
    return not (iteration < (first or 1) or (last is not None and iteration > last))


def _sites(name: ModuleId) -> tuple[Site, ...]:
    """The sites whose keys configure a module."""
    if name.name == ATTENTION:
        return Site.QK, Site.PV
    if is_norm(name.name):
        return (Site.NORM,)
    return (Site.OUTPUT,) if name.name in (OUTPUT, EMBEDDING) else (Site.LINEAR,)


def _slot_of(name: ModuleId, slot: Slot) -> Slot | None:
    """A configured slot as the map of the module has it; None if it has none."""
    if name.name == EMBEDDING:  # it looks up the rows that the output layer's fprop multiplies
        return LOOKUP_W if slot == FPROP_W._replace(site=Site.OUTPUT) else None
    return slot._replace(site=Site.LINEAR) if name.name == OUTPUT else slot


def _resolved(
    quant: QuantConfig, sites: Sequence[Site], rules: Sequence[Rule]
) -> dict[Slot, QuantSpec]:
    """What is configured for each slot of some sites, under the rules of a module."""
    own = {name: declared_format(name, content) for name, content in quant.formats.items()}
    resolved: dict[Slot, QuantSpec] = {}
    for slot in (slot for site in sites for slot in slots_of(site)):
        of_site: Any = getattr(quant, slot.site.value)
        of_slot = getattr(getattr(of_site, slot.product.value), slot.operand.value)
        covering = [rule for rule in reversed(rules) if _covers(rule, slot)]
        settings: list[Any] = [*covering, of_slot, of_site]
        word = next((each.format for each in settings if each.format is not None), _HIGH)
        if word == _COPY:
            resolved[slot] = _copy_of(resolved[slot._replace(product=Product.FPROP)])
        elif word == _HIGH:
            resolved[slot] = QuantSpec(get_format(_HIGH), axis=slot.axis)
        else:
            options = _options(settings, word, own)
            resolved[slot] = replace(
                _spec(slot, get_format(word, own), options),
                parts=tuple(_part(slot, each, own) for each in options.get("parts", ())),
            )
            source = options.get("of", "high")
            if source not in ("high", "forward"):
                resolved[slot] = replace(resolved[slot], of=_stored(slot, get_format(source, own)))
            elif source == "forward" and _has_copy(slot):
                copy = _copy_of(resolved[slot._replace(product=Product.FPROP)])
                resolved[slot] = replace(resolved[slot], of=copy if copy.quantised else None)
        resolved[slot] = replace(resolved[slot], softmax=declared_softmax(slot, settings))
    return resolved


def _copy_of(forward: QuantSpec) -> QuantSpec:
    """The forward copy in a backward product."""
    return replace(forward, reuse=True, clip_gradient=False, dge=None)


def _stored(slot: Slot, fmt: Format) -> QuantSpec | None:
    """The copy of x or g of a linear layer in a format, along its rows."""
    width = {Operand.X: Axis.INPUT_WIDTH, Operand.G: Axis.OUTPUT_WIDTH}.get(slot.operand)
    if width is None or slot.site not in (Site.LINEAR, Site.OUTPUT):
        return None
    return replace(_spec(slot, fmt, {}), axis=width)


def _has_copy(slot: Slot) -> bool:
    """Whether a slot's operand is one of the forward product before."""
    return slot.product is not Product.FPROP and slot.operand not in _GRADIENTS


def _covers(rule: Rule, slot: Slot) -> bool:
    named = (
        (rule.sites, slot.site.value),
        (rule.products, slot.product.value),
        (rule.operands, slot.operand.value),
    )
    return all(not words or word in words for words, word in named)


def _options(settings: Sequence[Any], word: str, own: Mapping[str, Format]) -> Mapping[str, Any]:
    """The options in force for the format that `word` names, by name."""

    def is_for(setting: Any) -> bool:
        if setting.format in (_HIGH, _COPY):
            return False
        return setting.format is None or get_format(setting.format, own) == get_format(word, own)

    options: dict[str, Any] = {}
    for setting in reversed(list(takewhile(is_for, settings))):
        options |= {name: value for name, value in vars(setting).items() if value is not None}
    return options


def _spec(slot: Slot, fmt: Format, options: Mapping[str, Any]) -> QuantSpec:
    """An operand in a format, with the scheme's defaults."""
    is_hifp8 = fmt.family is Family.HIF8 and not fmt.definition
    rule = ScaleRule.FLOOR
    if fmt.definition:
        rule = fmt.scale_rule or rule
    elif fmt.name.startswith("mxfp8"):
        rule = ScaleRule.RCEIL
    target = fmt.amax_target
    scaling = Scaling(options.get("scaling", Scaling.CURRENT if is_hifp8 else fmt.scaling))
    if is_hifp8 and scaling is not Scaling.NONE:
        target = 224.0 if slot.operand in _GRADIENTS else 15.0
    hadamard = Hadamard(options.get("hadamard", Hadamard.NONE))
    sizes = {2**n for n in range(1, 9)}
    transformed = fmt.block if fmt.block in sizes else 32
    return QuantSpec(
        fmt,
        block=options.get("block", fmt.block or 1),
        scale_rule=ScaleRule(options.get("scale_rule", rule)),
        rounding=Rounding(options.get("rounding", fmt.rounding)),
        saturate=options.get("saturate", True),
        scaling=scaling,
        amax_target=target or 1.0,
        pre_scale=_factor(options.get("pre_scale", False)),
        hadamard=hadamard,
        hadamard_block=1
        if hadamard is Hadamard.NONE
        else options.get("hadamard_block", transformed),
        axis=slot.axis,
        window=options.get("window", 16) if scaling is Scaling.DELAYED else None,
        clip_gradient=slot.product is Product.FPROP and options.get("clip_gradient", False),
        dge=options.get("dge") if slot == FPROP_W else None,
        left=slot.is_left,
        weight=slot.operand is Operand.W,
    )


def _factor(pre_scale: bool | float) -> float:
    if isinstance(pre_scale, bool):
        return 0.75 if pre_scale else 1.0
    return pre_scale


def _part(slot: Slot, part: Any, own: Mapping[str, Format]) -> Part:
    """A part of an operand, in its format with the scheme's defaults."""
    spec = None
    if part.format == _HIGH:
        spec = QuantSpec(get_format(_HIGH), axis=slot.axis)
    elif part.format != _LEFT_OUT:
        spec = _spec(slot, get_format(part.format, own), {})
    return Part(
        Take(part.take),
        spec,
        None if part.along is None else Axis(part.along),
        part.number,
        part.share,
        part.from_error,
    )


def _with_stream(name: ModuleId, slot: Slot, spec: QuantSpec) -> QuantSpec:
    """With the key of its random numbers, signs or amax history: the label of the slot that is quantised."""
    if spec.of is not None:
        spec = replace(spec, of=_with_stream(name, slot, spec.of))
    if not (
        spec.rounding is Rounding.STOCHASTIC
        or spec.fmt.family is Family.PYTHON
        or spec.scaling is Scaling.DELAYED
        or spec.hadamard is not Hadamard.NONE
    ):
        return spec
    module = ModuleId(name.layer, OUTPUT) if name.name == EMBEDDING else name
    source = slot._replace(product=Product.FPROP) if spec.reuse else slot
    return replace(spec, stream=f"{module} {source}")


def _difference(own: QuantSpec | None, expected: QuantSpec) -> str:
    """The first thing that the map says otherwise; empty if there is none."""
    if own is None:
        return f"configured as {expected.fmt.name}, and the map lacks it"
    for each in fields(QuantSpec):
        ours, theirs = getattr(own, each.name), getattr(expected, each.name)
        if ours != theirs:
            if each.name == "parts":
                words = (
                    ", ".join(part_words(part_record(part)) for part in parts) or "none"
                    for parts in (theirs, ours)
                )
                return "configured with the parts {}, and the map has {}".format(*words)
            if isinstance(ours, Format):
                return f"configured as {theirs.name}, and the map has {ours.name}"
            if each.name == "of":
                ours, theirs = (
                    "high" if of is None else "forward" if of.reuse else of.fmt.name
                    for of in (ours, theirs)
                )
            return f"configured with {each.name} {theirs}, and the map has {ours}"
    return ""
