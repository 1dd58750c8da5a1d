"""The precision map: for every layer, module, matrix product and operand, exactly how it is held.

It follows from the configuration alone, so `plan` prints it without a GPU, without data and without torch, the layers
are built from it, and the proof of engagement is held against it. Rules with a range of iterations make the map
a function of the iteration; `changes` lists the iterations at which it changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from quantexp.errors import ConfigError
from quantexp.model.decoder import ATTENTION, alike_layers, in_words, layer_modules
from quantexp.quant.choosing import Setting
from quantexp.quant.sites import Product, Site, slots_of
from quantexp.quant.slots import Key, Operand, resolve_site, site_configs
from quantexp.schema import ModelConfig, QuantConfig, Rule


@dataclass(frozen=True)
class ModuleId:
    """One module of the decoder that multiplies: its layer (from 0, global) and its name."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"layer {self.layer} {self.name}"


@dataclass(frozen=True)
class Entry:
    """One operand of one product of one module."""

    module: ModuleId
    site: Site
    product: Product
    name: str
    operand: Operand

    @property
    def label(self) -> str:
        """The slot in the words of every message: `layer 0 fc1 linear.wgrad.g`."""
        return slot_label(self.module, self.site, self.product, self.name)


def slot_label(module: ModuleId, site: Site, product: Product, name: str) -> str:
    """One operand of one product of one module, in the words of every message."""
    return f"{module} {site.value}.{product.value}.{name}"


#: The operands of a module's sites.
Sites = dict[Site, dict[Key, Operand]]


@dataclass(frozen=True)
class ModulePrecision:
    """What one module needs to know: the operands of its sites, which modules that are alike may share."""

    module: ModuleId
    sites: Sites
    #: The same before operands got their streams, where any has one.
    unnamed: Sites | None = field(default=None, compare=False, repr=False)

    @property
    def alike(self) -> Sites:
        """The operands but for their streams: one object for all modules of a map that are held alike."""
        return self.sites if self.unnamed is None else self.unnamed

    def operand(self, site: Site, product: Product, name: str) -> Operand:
        """The operand of a product, as declared."""
        return self.sites[site][product, name]

    def entries(self) -> Iterator[Entry]:
        """Every slot of the module, in the order of the products."""
        for site, operands in self.sites.items():
            for (product, name), operand in operands.items():
                yield Entry(self.module, site, product, name, operand)


PrecisionMap = dict[ModuleId, ModulePrecision]


def decoder_modules(model: ModelConfig) -> list[tuple[ModuleId, tuple[Site, ...]]]:
    """Every module of the decoder that multiplies, with its sites."""
    return [
        (ModuleId(layer, name), (Site.QK, Site.PV) if name == ATTENTION else (Site.LINEAR,))
        for first, count in alike_layers(model)
        for names in (layer_modules(model, first),)
        for layer in range(first, first + count)
        for name in names
    ]


def precision_map(model: ModelConfig, quant: QuantConfig, iteration: int = 1) -> PrecisionMap:
    """The map in force in an iteration (from 1).

    Raises:
        ConfigError: a site or rule that cannot be, named by its full key.
    """
    rules = [(i, rule) for i, rule in enumerate(quant.rules) if _is_in_force(rule, iteration)]
    # modules come by the thousand, and those that the same rules apply to are alike.
    resolved: dict[tuple[tuple[Site, ...], tuple[int, ...]], Sites] = {}
    found: PrecisionMap = {}
    for module, sites in decoder_modules(model):
        applying = tuple(i for i, rule in rules if _applies(rule, module, model.num_layers))
        if (sites, applying) not in resolved:
            resolved[sites, applying] = {site: _operands(site, quant, applying) for site in sites}
        found[module] = _named(module, resolved[sites, applying])
    return found


def declared_maps(model: ModelConfig, quant: QuantConfig) -> list[PrecisionMap]:
    """Every precision map of a run, one for each of `changes`."""
    return [precision_map(model, quant, iteration) for iteration in changes(quant)]


def map_in_force(maps: Sequence[PrecisionMap], quant: QuantConfig, iteration: int) -> PrecisionMap:
    """The one of a run's `declared_maps` that holds in an iteration (from 1)."""
    return maps[bisect_right(changes(quant), iteration) - 1]


def distinct_sites(declared: PrecisionMap) -> list[Sites]:
    """Every way in which modules of a map are held, once, without streams."""
    return list({id(module.alike): module.alike for module in declared.values()}.values())


def changes(quant: QuantConfig) -> list[int]:
    """The iterations, from 1, at which the map may differ from the one before; 1 is always among them."""
    points = {1}
    for rule in quant.rules:
        if rule.iterations:
            first, last = rule.iterations
            points.add(first or 1)
            if last is not None:
                points.add(last + 1)
    return sorted(points)


def check_rules(model: ModelConfig, quant: QuantConfig) -> None:
    """Refuse rules that can never apply or name what does not exist.

    Raises:
        ConfigError: naming the rule by its index.
    """
    modules = [m for m, _ in decoder_modules(model)]
    sites = [s.value for s in Site]
    products = [p.value for p in Product]
    operands = sorted({name for site in Site for _, name in slots_of(site)})
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
            if not any(fnmatchcase(m.name, pattern) for m in modules):
                names = in_words(m.name for m in modules)
                raise ConfigError(f"{where}.modules must match one of {names}, got {pattern!r}")
        _check_iterations(where, rule)


def _check_iterations(where: str, rule: Rule) -> None:
    if not rule.iterations:
        return
    if len(rule.iterations) != 2 or rule.iterations[0] is None:
        raise ConfigError(
            f"{where}.iterations must be [first, last], iterations from 1, got {rule.iterations}"
        )
    first, last = rule.iterations
    assert first is not None
    if first < 1 or (last is not None and last < first):
        raise ConfigError(
            f"{where}.iterations must be [first, last] with 1 <= first <= last, got {rule.iterations}"
        )


def _known(key: str, given: list[str], allowed: list[str]) -> None:
    for value in given:
        if value not in allowed:
            raise ConfigError(f"{key} must be among {', '.join(allowed)}, got {value!r}")


def _operands(site: Site, quant: QuantConfig, applying: Sequence[int]) -> dict[Key, Operand]:
    """What a site comes to in a module that these rules apply to."""
    overlays = {
        key: [
            Setting(f"quant.rules[{i}]", quant.rules[i])
            for i in reversed(applying)
            if _means(quant.rules[i], site, key)
        ]
        for key in slots_of(site)
    }
    return resolve_site(site, site_configs(quant)[site], overlays)


def _named(module: ModuleId, sites: Sites) -> ModulePrecision:
    """The operands with their streams, where any needs one: a forward copy repeats the forward's."""
    if not any(operand.depends_on_moment for site in sites.values() for operand in site.values()):
        return ModulePrecision(module, sites)
    named = {
        site: {key: _with_stream(module, site, key, operand) for key, operand in operands.items()}
        for site, operands in sites.items()
    }
    return ModulePrecision(module, named, unnamed=sites)


def _with_stream(module: ModuleId, site: Site, key: Key, operand: Operand) -> Operand:
    if not operand.depends_on_moment:
        return operand
    product, name = key
    product = Product.FPROP if operand.reuse else product
    return replace(operand, stream=slot_label(module, site, product, name))


def _is_in_force(rule: Rule, iteration: int) -> bool:
    first, last = rule.iterations or (1, None)
    return (first or 1) <= iteration and (last is None or iteration <= last)


def _applies(rule: Rule, module: ModuleId, num_layers: int) -> bool:
    layers = [layer % num_layers for layer in rule.layers]
    return (not layers or module.layer in layers) and (
        not rule.modules or any(fnmatchcase(module.name, p) for p in rule.modules)
    )


def _means(rule: Rule, site: Site, key: Key) -> bool:
    """Whether a rule is for a slot of the modules that it applies to."""
    product, name = key
    return (
        (not rule.sites or site.value in rule.sites)
        and (not rule.products or product.value in rule.products)
        and (not rule.operands or name in rule.operands)
    )


def entry_record(entry: Entry) -> dict[str, object]:
    """An entry as the precision map's JSON holds it."""
    operand = entry.operand
    return {
        "layer": entry.module.layer,
        "module": entry.module.name,
        "site": entry.site.value,
        "product": entry.product.value,
        "operand": entry.name,
        **operand_record(operand),
    }


def operand_record(operand: Operand) -> dict[str, object]:
    """An operand's format and options, Enums by their values."""
    return {
        "format": operand.format,
        "axis": operand.axis,
        "block": operand.block,
        "scale_rule": operand.scale_rule.value if operand.scale_rule else None,
        "rounding": operand.rounding.value if operand.rounding else None,
        "scaling": operand.scaling.value if operand.scaling else None,
        "saturate": operand.saturate,
        "amax_target": operand.amax_target,
        "reuse": operand.reuse,
        **_later_options(operand),
    }


def _later_options(operand: Operand) -> dict[str, object]:
    """Options that are part of a record only where they are set: without them a scheme keeps its identity."""
    options = {
        "pre_scale": operand.pre_scale,
        "window": operand.window,
        "clip_gradient": operand.clip_gradient,
        "hadamard": operand.hadamard.value if operand.hadamard else None,
        "hadamard_block": operand.hadamard_block,
    }
    return {name: value for name, value in options.items() if value is not None}
