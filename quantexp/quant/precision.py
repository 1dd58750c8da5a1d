"""The precision map: for every layer, module, matrix product and operand, exactly how it is held.

It follows from the configuration alone, so `plan` prints it without a GPU, without data and without torch, the layers
are built from it, and the proof of engagement is held against it. Rules with a range of iterations make the map
a function of the iteration; `changes` lists the iterations at which it changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from quantexp.decoder import ATTENTION, layer_modules
from quantexp.errors import ConfigError
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


@dataclass(frozen=True)
class ModulePrecision:
    """What one module needs to know: the operands of its sites."""

    module: ModuleId
    sites: dict[Site, dict[Key, Operand]]

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
        for layer in range(model.num_layers)
        for name in layer_modules(model, layer)
    ]


def precision_map(model: ModelConfig, quant: QuantConfig, iteration: int = 1) -> PrecisionMap:
    """The map in force in an iteration (from 1).

    Raises:
        ConfigError: a site or rule that cannot be, named by its full key.
    """
    resolved: _Resolved = {}
    return {
        module: ModulePrecision(
            module,
            {site: _operands(module, site, model, quant, iteration, resolved) for site in sites},
        )
        for module, sites in decoder_modules(model)
    }


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
                names = ", ".join(dict.fromkeys(m.name for m in modules))
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


#: What a site comes to, by the rules that apply to each of its slots: modules by the thousand are alike.
_Resolved = dict[tuple[Site, tuple[tuple[int, ...], ...]], dict[Key, Operand]]


def _operands(
    module: ModuleId,
    site: Site,
    model: ModelConfig,
    quant: QuantConfig,
    iteration: int,
    resolved: _Resolved,
) -> dict[Key, Operand]:
    keys = slots_of(site)
    applying = tuple(
        tuple(
            index
            for index, rule in enumerate(quant.rules)
            if _applies(rule, module, site, key, model.num_layers, iteration)
        )
        for key in keys
    )
    operands = resolved.get((site, applying))
    if operands is None:
        overlays = {
            key: [Setting(f"quant.rules[{i}]", quant.rules[i]) for i in reversed(indices)]
            for key, indices in zip(keys, applying, strict=True)
        }
        operands = resolve_site(site, site_configs(quant)[site], overlays)
        resolved[site, applying] = operands
    return {key: _named(module, site, key, operand) for key, operand in operands.items()}


def _named(module: ModuleId, site: Site, key: Key, operand: Operand) -> Operand:
    """The operand with its stream, where it needs one: a forward copy repeats the forward's."""
    if not operand.depends_on_moment:
        return operand
    product, name = key
    product = Product.FPROP if operand.reuse else product
    return replace(operand, stream=slot_label(module, site, product, name))


def _applies(
    rule: Rule, module: ModuleId, site: Site, key: Key, num_layers: int, iteration: int
) -> bool:
    product, name = key
    layers = [layer % num_layers for layer in rule.layers]
    first, last = rule.iterations or (1, None)
    return (
        (not layers or module.layer in layers)
        and (not rule.modules or any(fnmatchcase(module.name, p) for p in rule.modules))
        and (not rule.sites or site.value in rule.sites)
        and (not rule.products or product.value in rule.products)
        and (not rule.operands or name in rule.operands)
        and (first or 1) <= iteration
        and (last is None or iteration <= last)
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
