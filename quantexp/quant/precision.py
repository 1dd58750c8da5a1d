"""The precision map: the exact format and options of every layer, module, matrix product and operand.

It depends on the configuration alone: `plan` prints it without GPU, data or torch, the layers are built from it, and
the proof of engagement compares operands with it. Rules with a range of iterations make the map a function of the
iteration; `changes` lists the iterations at which it changes.
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
    """One module of the decoder with matrix products: its layer (from 0, global) and its name."""

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
        """The slot as named in every message: `layer 0 fc1 linear.wgrad.g`."""
        return slot_label(self.module, self.site, self.product, self.name)


def slot_label(module: ModuleId, site: Site, product: Product, name: str) -> str:
    """One operand of one product of one module, as named in every message."""
    return f"{module} {site.value}.{product.value}.{name}"


#: The operands of a module's sites.
Sites = dict[Site, dict[Key, Operand]]


@dataclass(frozen=True)
class ModulePrecision:
    """The operands of one module's sites; modules with equal operands may share them."""

    module: ModuleId
    sites: Sites
    #: The operands before streams were assigned, if any has one.
    without_streams: Sites | None = field(default=None, compare=False, repr=False)

    @property
    def alike(self) -> Sites:
        """The operands without their streams: one object for all modules of a map with equal operands."""
        return self.sites if self.without_streams is None else self.without_streams

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
    rules = [(i, rule) for i, rule in enumerate(quant.rules) if _is_in_force(rule, iteration)]
    # A model may have thousands of modules; modules with the same rules share their operands.
    resolved: dict[tuple[tuple[Site, ...], tuple[int, ...]], Sites] = {}
    modules: PrecisionMap = {}
    for module, sites in decoder_modules(model):
        applying = tuple(i for i, rule in rules if _applies(rule, module, model.num_layers))
        if (sites, applying) not in resolved:
            resolved[sites, applying] = {site: _operands(site, quant, applying) for site in sites}
        modules[module] = _with_streams(module, resolved[sites, applying])
    return modules


def declared_maps(model: ModelConfig, quant: QuantConfig) -> list[PrecisionMap]:
    """Every precision map of a run, one for each of `changes`."""
    return [precision_map(model, quant, iteration) for iteration in changes(quant)]


def map_in_force(maps: Sequence[PrecisionMap], quant: QuantConfig, iteration: int) -> PrecisionMap:
    """The entry of a run's `declared_maps` for an iteration (from 1)."""
    return maps[bisect_right(changes(quant), iteration) - 1]


def distinct_sites(declared: PrecisionMap) -> list[Sites]:
    """Every distinct set of operands in a map, once, without streams."""
    return list({id(module.alike): module.alike for module in declared.values()}.values())


def changes(quant: QuantConfig) -> list[int]:
    """The iterations, from 1, at which the map may change; 1 is always included."""
    points = {1}
    for rule in quant.rules:
        if rule.iterations:
            first, last = rule.iterations
            points.add(first or 1)
            if last is not None:
                points.add(last + 1)
    return sorted(points)


def check_rules(model: ModelConfig, quant: QuantConfig) -> None:
    """Refuse rules that can never apply or that name something unknown.

    Raises:
        ConfigError: names the rule by its index.
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


def _known(key: str, values: list[str], allowed: list[str]) -> None:
    for value in values:
        if value not in allowed:
            raise ConfigError(f"{key} must be among {', '.join(allowed)}, got {value!r}")


def _operands(site: Site, quant: QuantConfig, applying: Sequence[int]) -> dict[Key, Operand]:
    """The operands of a site in a module that these rules apply to."""
    overlays = {
        key: [
            Setting(f"quant.rules[{i}]", quant.rules[i])
            for i in reversed(applying)
            if _covers(quant.rules[i], site, key)
        ]
        for key in slots_of(site)
    }
    return resolve_site(site, site_configs(quant)[site], overlays)


def _with_streams(module: ModuleId, sites: Sites) -> ModulePrecision:
    """The operands with their streams, if any needs one; a forward copy repeats the forward slot's stream."""
    if not any(operand.needs_step_state for site in sites.values() for operand in site.values()):
        return ModulePrecision(module, sites)
    streamed = {
        site: {key: _with_stream(module, site, key, operand) for key, operand in operands.items()}
        for site, operands in sites.items()
    }
    return ModulePrecision(module, streamed, without_streams=sites)


def _with_stream(module: ModuleId, site: Site, key: Key, operand: Operand) -> Operand:
    if not operand.needs_step_state:
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


def _covers(rule: Rule, site: Site, key: Key) -> bool:
    """Whether a rule covers a slot of the modules that it applies to."""
    product, name = key
    return (
        (not rule.sites or site.value in rule.sites)
        and (not rule.products or product.value in rule.products)
        and (not rule.operands or name in rule.operands)
    )


def entry_record(entry: Entry) -> dict[str, object]:
    """An entry in the form of the precision map's JSON."""
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
    """An operand's format and options; Enums as their values."""
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
    """Options recorded only if set, so that schemes without them keep their identity."""
    options = {
        "pre_scale": operand.pre_scale,
        "window": operand.window,
        "clip_gradient": operand.clip_gradient,
        "hadamard": operand.hadamard.value if operand.hadamard else None,
        "hadamard_block": operand.hadamard_block,
    }
    return {name: value for name, value in options.items() if value is not None}
