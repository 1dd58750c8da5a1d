"""Groups of a scheme's quantised slots, and the rules that turn groups to the working precision.

A unit holds the quantised slots of a map that agree in the chosen aspects (`slot`: site, product and operand; `layer`;
`module`: layer and name; ...). Slots that cannot be turned off one by one stay together: a forward copy (`reuse`,
`of: forward`) follows its forward slot, and the two operands of a product under a Hadamard transform need each other.
A gradient that is clipped in the domain of a transform needs the product that gives it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from quantexp.errors import ConfigError
from quantexp.model.decoder import EMBEDDING, FINAL_NORM, OUTPUT
from quantexp.quant.precision import Entry, PrecisionMap, configured
from quantexp.quant.sites import DGRAD_W, WGRAD_X, Operand, Product, Slot
from quantexp.quant.slots import WORKING
from quantexp.schema import Aspect, Rule


@dataclass(frozen=True)
class Key:
    """The aspects that a unit fixes; None for one that it leaves open."""

    layer: int | None = None
    module: str | None = None
    site: str | None = None
    product: str | None = None
    operand: str | None = None

    def rule(self) -> Rule:
        """The rule that turns exactly the slots of this key, besides those that no format rounds, to bf16."""
        is_beside = OUTPUT in (self.module, self.site) or self.module == FINAL_NORM
        return Rule(
            layers=[] if self.layer is None or is_beside else [self.layer],
            modules=[] if self.module is None else [self.module],
            sites=[] if self.site is None else [self.site],
            products=[] if self.product is None else [self.product],
            operands=[] if self.operand is None else [self.operand],
            format=WORKING,
        )

    def __str__(self) -> str:
        slot = ".".join(filter(None, (self.site, self.product, self.operand)))
        layer = None if self.layer is None else f"layer {self.layer}"
        place = " ".join(filter(None, (layer, self.module)))
        if OUTPUT in (self.module, self.site) and self.layer is not None:
            place, slot = "output layer", slot if self.product else ""
        if self.module == FINAL_NORM:
            place = FINAL_NORM
        return " ".join(filter(None, (place, slot)))


@dataclass(frozen=True)
class Unit:
    """Slots that are turned off together; keys in the order of the map."""

    keys: tuple[Key, ...]

    def __str__(self) -> str:
        first, *others = self.keys
        return " + ".join([str(first), *(_ending(first, other) for other in others)])


def _ending(first: Key, other: Key) -> str:
    """A further key without the aspects that it shares with the first one."""
    if replace(other, product=first.product, operand=first.operand) == first:
        return ".".join(filter(None, (other.product, other.operand)))
    return str(other)


def aspects_of(names: Sequence[str], option: str = "gradient.by") -> tuple[Aspect, ...]:
    """The aspects with these names, each once; `option` is what gave them.

    Raises:
        ConfigError: names an unknown one.
    """
    known = [aspect.value for aspect in Aspect]
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} must be among {', '.join(known)}, got {name!r}")
    return tuple(Aspect(name) for name in dict.fromkeys(names))


def units_of(maps: Iterable[PrecisionMap], aspects: Sequence[Aspect]) -> list[Unit]:
    """The units of all quantised slots in these maps, in the order of the first map; empty for bf16.

    A tied embedding, which looks up the output layer's weight, is part of that one's unit.
    """
    members: dict[Key, set[Key]] = {}
    for declared in maps:
        for module in declared.values():
            if module.module.name == EMBEDDING:
                continue
            for entry in module.entries():
                if not entry.spec.quantised:
                    continue
                key = key_of(entry, aspects)
                joined = members.setdefault(key, {key})
                for slot in _tied(entry):
                    if module.slots[slot].quantised:
                        other = key_of(entry._replace(slot=slot), aspects)
                        _join(members, joined, members.setdefault(other, {other}))
                        joined = members[key]
    order = {key: place for place, key in enumerate(members)}
    groups = {id(group): group for group in members.values()}
    return [Unit(tuple(sorted(group, key=order.__getitem__))) for group in groups.values()]


def key_of(entry: Entry, aspects: Sequence[Aspect]) -> Key:
    """The key of the unit that a slot belongs to."""
    slot, module = configured(entry.module.name, entry.slot), entry.module
    is_output = module.name == OUTPUT
    has_layer = Aspect.layer in aspects or Aspect.module in aspects
    has_product = Aspect.product in aspects or Aspect.slot in aspects
    has_site = has_product or Aspect.site in aspects or (is_output and has_layer)
    return Key(
        module.layer if has_layer else None,
        module.name
        if Aspect.module in aspects or (module.name == FINAL_NORM and has_layer)
        else None,
        slot.site.value if has_site else None,
        slot.product.value if has_product else None,
        slot.operand.value if Aspect.slot in aspects else None,
    )


def _tied(entry: Entry) -> list[Slot]:
    """The slots of the same module that are turned off with this one."""
    slot, spec = entry.slot, entry.spec
    tied = []
    if spec.copy is not None:
        tied.append(slot._replace(product=Product.FPROP))
    if spec.is_transformed and not spec.reuse:
        other = slot.shape.right if slot.is_left else slot.shape.left
        tied.append(slot._replace(operand=other))
        if spec.clip_gradient:  # the gradient of the transform comes from that product
            tied.append(WGRAD_X if slot.operand is Operand.W else DGRAD_W)
    return tied


def _join(members: dict[Key, set[Key]], one: set[Key], other: set[Key]) -> None:
    if one is not other:
        one |= other
        for key in other:
            members[key] = one


def working_rules(units: Iterable[Unit]) -> list[Rule]:
    """The rules that turn exactly the slots of these units to the working precision, as few as simple merging gives."""
    rules = [key.rule() for unit in units for key in unit.keys]
    for name in ("operands", "products", "sites", "modules", "layers"):
        rules = _merged(rules, name)
    return rules


def _merged(rules: Sequence[Rule], name: str) -> list[Rule]:
    """The rules with those that differ in one list alone made one; an empty list stands for all and is not merged."""
    merged: dict[str, Rule] = {}
    for rule in rules:
        values = getattr(rule, name)
        others = {f.name: getattr(rule, f.name) for f in fields(rule) if f.name != name}
        key = repr((others, bool(values)))
        if key not in merged:
            merged[key] = rule
        else:
            joined = dict.fromkeys([*getattr(merged[key], name), *values])
            merged[key] = copy.copy(merged[key])
            setattr(merged[key], name, list(joined))
    return list(merged.values())
