"""The precision map: the exact format and options of every layer, module, matrix product and operand.

It depends on the configuration alone: `plan` prints it without GPU, data or torch, the layers are built from it, and
the proof of engagement compares operands with it. Rules with a range of iterations make the map a function of the
iteration; `changes` lists the iterations at which it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from quantexp.errors import ConfigError
from quantexp.formats.spec import QuantSpec
from quantexp.model.decoder import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    alike_layers,
    in_words,
    layer_modules,
    norm_widths,
)
from quantexp.quant.choosing import Setting
from quantexp.quant.rules import (
    changes,
    check_conditions,
    check_iterations,
    covers,
    is_in_force,
    names_norms,
    names_output,
    variants,
)
from quantexp.quant.sites import LOOKUP_W, Operand, Product, Site, Slot, slots_of
from quantexp.quant.slots import (
    REUSE,
    WORKING,
    declared_formats,
    resolve_site,
    site_configs,
    working_spec,
)
from quantexp.schema import CaptureRule, ModelConfig, QuantConfig, Rule


class ModuleId(NamedTuple):
    """One module with matrix products, or a norm: its layer (from 0, global) and its name.

    The output layer, the embedding and the final norm count as the layer after the last.
    """

    layer: int
    name: str

    def __str__(self) -> str:
        if self.name == OUTPUT:
            return "output layer"
        if self.name in (EMBEDDING, FINAL_NORM):
            return self.name
        return f"layer {self.layer} {self.name}"

    def is_named(self, rule: Rule | CaptureRule, num_layers: int) -> bool:
        """Whether a rule names the module by its layer and a shell pattern; an empty list names all."""
        layers = [layer % num_layers for layer in rule.layers]
        return (not layers or self.layer in layers) and (
            not rule.modules or any(fnmatchcase(self.name, p) for p in rule.modules)
        )


class Entry(NamedTuple):
    """One slot of one module."""

    module: ModuleId
    slot: Slot
    spec: QuantSpec

    @property
    def label(self) -> str:
        """The slot as named in every message: `layer 0 fc1 linear.wgrad.g`."""
        return f"{self.module} {configured(self.module.name, self.slot)}"


def configured(module: str, slot: Slot) -> Slot:
    """A slot of a module under the site that configures it: the output layer has the slots of a linear layer."""
    return slot._replace(site=Site.OUTPUT) if module == OUTPUT else slot


#: The slots of a module's sites.
Slots = dict[Slot, QuantSpec]


@dataclass(frozen=True)
class ModulePrecision:
    """The slots of one module; modules with equal slots may share them."""

    module: ModuleId
    slots: Slots
    #: The slots before streams were assigned, if any has one.
    without_streams: Slots | None = field(default=None, compare=False, repr=False)

    @property
    def alike(self) -> Slots:
        """The slots without their streams: one object for all modules of a map with equal slots."""
        return self.slots if self.without_streams is None else self.without_streams

    @property
    def is_linear(self) -> bool:
        """Whether its products are those of a linear layer."""
        return any(slot.site is Site.LINEAR for slot in self.slots)

    @property
    def is_quantised(self) -> bool:
        """Whether any slot has a format, or its operand is another tensor than in the working precision."""
        return any(spec.quantised or not spec.softmax.is_stock for spec in self.slots.values())

    def spec(self, slot: Slot) -> QuantSpec:
        """What happens to an operand, as declared."""
        return self.slots[slot]

    def entries(self) -> Iterator[Entry]:
        """Every slot of the module, in the order of the products."""
        for slot, spec in self.slots.items():
            yield Entry(self.module, slot, spec)


PrecisionMap = dict[ModuleId, ModulePrecision]


def decoder_modules(model: ModelConfig) -> list[tuple[ModuleId, tuple[Site, ...]]]:
    """Every module of the decoder with matrix products, and its sites."""
    return [
        (ModuleId(layer, name), (Site.QK, Site.PV) if name == ATTENTION else (Site.LINEAR,))
        for first, count in alike_layers(model)
        for names in (layer_modules(model, first),)
        for layer in range(first, first + count)
        for name in names
    ]


def precision_map(model: ModelConfig, quant: QuantConfig, iteration: int = 1) -> PrecisionMap:
    """The precision map at an iteration (from 1).

    Raises:
        ConfigError: an invalid site or rule, named by its full key.
    """
    rules = [(i, rule) for i, rule in enumerate(quant.rules) if is_in_force(rule, iteration)]
    # A model may have thousands of modules; modules with the same rules share their slots.
    resolved: dict[tuple[tuple[Site, ...], tuple[int, ...]], Slots] = {}
    modules: PrecisionMap = {}
    for module, sites in decoder_modules(model):
        applying = tuple(i for i, rule in rules if module.is_named(rule, model.num_layers))
        if (sites, applying) not in resolved:
            resolved[sites, applying] = {
                slot: spec for site in sites for slot, spec in _resolved(site, quant, applying)
            }
        modules[module] = _with_streams(module, resolved[sites, applying])
    if quantises_norms(quant):
        modules |= _norms(model, quant, rules)
    return modules | (_beside_decoder(model, quant, rules) if quantises_output(quant) else {})


def quantises_output(quant: QuantConfig) -> bool:
    """Whether a scheme quantises the output layer: `quant.output` does, or a rule that names it.

    Only then it is in the map, and rules that name neither a site nor a module cover it.
    """
    return _quantises(quant, Site.OUTPUT, names_output)


def quantises_norms(quant: QuantConfig) -> bool:
    """Whether a scheme quantises norms, as `quantises_output`; then all of them are in the map."""
    return _quantises(quant, Site.NORM, names_norms)


def _quantises(quant: QuantConfig, site: Site, names: Callable[[Rule], bool]) -> bool:
    slots = resolve_site(site, site_configs(quant)[site], declared=declared_formats(quant))
    return any(spec.quantised for spec in slots.values()) or any(
        rule.format not in (None, WORKING, REUSE) and names(rule) for rule in quant.rules
    )


def _norms(
    model: ModelConfig, quant: QuantConfig, rules: Sequence[tuple[int, Rule]]
) -> PrecisionMap:
    """The norms of the layers, and the one after the last layer."""
    names = [
        ModuleId(layer, name) for layer in range(model.num_layers) for name in norm_widths(model)
    ]
    resolved: dict[tuple[int, ...], Slots] = {}
    modules: PrecisionMap = {}
    for module in (*names, ModuleId(model.num_layers, FINAL_NORM)):
        applying = tuple(i for i, rule in rules if module.is_named(rule, model.num_layers))
        if applying not in resolved:
            resolved[applying] = dict(_resolved(Site.NORM, quant, applying))
        modules[module] = ModulePrecision(module, resolved[applying])
    return modules


def _beside_decoder(
    model: ModelConfig, quant: QuantConfig, rules: Sequence[tuple[int, Rule]]
) -> PrecisionMap:
    """The output layer, and the embedding if it is tied: it looks up the weight that fprop multiplies.

    Raises:
        ConfigError: an invalid site or rule, or rows of a tied weight that are no rows of an embedding.
    """
    output = ModuleId(model.num_layers, OUTPUT)
    applying = [i for i, rule in rules if output.is_named(rule, model.num_layers)]
    declared = _with_streams(output, dict(_resolved(Site.OUTPUT, quant, applying)))
    modules = {output: _mapped(declared, lambda slot: slot._replace(site=Site.LINEAR))}
    if model.tie_embeddings:
        fprop_w = LOOKUP_W._replace(product=Product.FPROP)
        _check_lookup(declared.spec(fprop_w))
        embedding = replace(declared, module=ModuleId(model.num_layers, EMBEDDING))
        modules[embedding.module] = _mapped(embedding, {fprop_w: LOOKUP_W}.get)
    return modules


def _mapped(declared: ModulePrecision, name: Callable[[Slot], Slot | None]) -> ModulePrecision:
    """The slots under other names; those without one are left out."""

    def named(slots: Slots) -> Slots:
        return {new: spec for slot, spec in slots.items() if (new := name(slot)) is not None}

    plain = declared.without_streams
    return ModulePrecision(
        declared.module, named(declared.slots), None if plain is None else named(plain)
    )


def _check_lookup(spec: QuantSpec) -> None:
    for option, is_set in (
        ("hadamard", spec.is_transformed),
        ("pre_scale", spec.is_pre_scaled),
        ("parts", bool(spec.parts)),
    ):
        if is_set:
            raise ConfigError(
                f"quant.output.fprop.w must have no {option} in a model with model.tie_embeddings=true: the embedding "
                "looks up rows of this weight, and only the product undoes it; remove it, or untie the embeddings"
            )


def forward_only(declared: PrecisionMap) -> PrecisionMap:
    """A map with the slots of the forward products, and of a lookup, alone."""

    def forward(slot: Slot) -> Slot | None:
        return slot if slot.product in (Product.FPROP, Product.LOOKUP) else None

    return {name: _mapped(module, forward) for name, module in declared.items()}


def unquantised(declared: PrecisionMap) -> PrecisionMap:
    """A map with the same slots, all in the working precision."""
    return {
        name: ModulePrecision(name, {slot: working_spec(slot) for slot in module.slots})
        for name, module in declared.items()
    }


def declared_maps(model: ModelConfig, quant: QuantConfig) -> list[PrecisionMap]:
    """Every precision map that a run may have: one for each of `changes`, then those under conditions of rules."""
    return [
        precision_map(model, each, iteration)
        for each in (quant, *variants(quant))
        for iteration in changes(each)
    ]


def distinct_slots(declared: PrecisionMap) -> list[Slots]:
    """Every distinct set of slots in a map, once, without streams."""
    return list({id(module.alike): module.alike for module in declared.values()}.values())


def check_rules(model: ModelConfig, quant: QuantConfig) -> None:
    """Refuse rules that can never apply or that name something unknown.

    Raises:
        ConfigError: names the rule by its index.
    """
    modules = [*(m.name for m, _ in decoder_modules(model)), *norm_widths(model), FINAL_NORM]
    modules.append(OUTPUT)
    sites = [s.value for s in Site]
    products = [p.value for p in Product if p is not Product.LOOKUP]
    operands = sorted(operand.value for operand in Operand)
    for index, rule in enumerate(quant.rules):
        where = f"quant.rules[{index}]"
        _known(f"{where}.sites", rule.sites, sites)
        _known(f"{where}.products", rule.products, products)
        _known(f"{where}.operands", rule.operands, operands)
        for layer in rule.layers:
            if not -model.num_layers <= layer < model.num_layers:
                raise ConfigError(
                    f"{where}.layers must lie between {-model.num_layers} and {model.num_layers - 1} for "
                    f"{model.num_layers} layers, got {layer}"
                )
        for pattern in rule.modules:
            if not any(fnmatchcase(name, pattern) for name in modules):
                names = in_words(modules)
                raise ConfigError(f"{where}.modules must match one of {names}, got {pattern!r}")
        if rule.layers and [OUTPUT] in (rule.sites, rule.modules):
            raise ConfigError(
                f"{where}.layers are layers of the decoder, and the output layer is none of them, got {rule.layers}; "
                "remove layers"
            )
        check_iterations(where, rule)
    check_conditions(quant)


def _known(key: str, values: list[str], allowed: list[str]) -> None:
    for value in values:
        if value not in allowed:
            raise ConfigError(f"{key} must be among {', '.join(allowed)}, got {value!r}")


def _resolved(
    site: Site, quant: QuantConfig, applying: Sequence[int]
) -> Iterable[tuple[Slot, QuantSpec]]:
    """The slots of a site in a module that these rules apply to."""
    overlays = {
        slot: [
            Setting(f"quant.rules[{i}]", quant.rules[i])
            for i in reversed(applying)
            if covers(quant.rules[i], slot)
        ]
        for slot in slots_of(site)
    }
    config, declared = site_configs(quant)[site], declared_formats(quant)
    return resolve_site(site, config, overlays, declared).items()


def _with_streams(module: ModuleId, slots: Slots) -> ModulePrecision:
    """The slots with their streams, if any needs one; a forward copy repeats the forward slot's stream."""
    if not any(spec.needs_step_state for spec in slots.values()):
        return ModulePrecision(module, slots)
    streamed = {slot: _with_stream(module, slot, spec) for slot, spec in slots.items()}
    return ModulePrecision(module, streamed, without_streams=slots)


def _with_stream(module: ModuleId, slot: Slot, spec: QuantSpec) -> QuantSpec:
    if spec.of is not None:
        spec = replace(spec, of=_with_stream(module, slot, spec.of))
    if not spec.needs_step_state:
        return spec
    source = slot._replace(product=Product.FPROP) if spec.reuse else slot
    return replace(spec, stream=f"{module} {source}")
