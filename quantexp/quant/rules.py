"""When a rule is in force, and which slots of a module it covers. Needs no torch."""

from __future__ import annotations

from fnmatch import fnmatchcase

from quantexp.errors import ConfigError
from quantexp.model.decoder import OUTPUT
from quantexp.quant.sites import Site, Slot
from quantexp.schema import QuantConfig, Rule


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


def is_in_force(rule: Rule, iteration: int) -> bool:
    """Whether a rule applies at an iteration (from 1)."""
    first, last = rule.iterations or (1, None)
    return (first or 1) <= iteration and (last is None or iteration <= last)


def covers(rule: Rule, slot: Slot) -> bool:
    """Whether a rule covers a slot of the modules that it applies to."""
    return (
        (not rule.sites or slot.site.value in rule.sites)
        and (not rule.products or slot.product.value in rule.products)
        and (not rule.operands or slot.operand.value in rule.operands)
    )


def names_output(rule: Rule) -> bool:
    """Whether a rule covers the output layer and names it: as a site or as a module, not by a pattern alone."""
    return (
        OUTPUT in (*rule.sites, *rule.modules)
        and (not rule.sites or OUTPUT in rule.sites)
        and (not rule.modules or any(fnmatchcase(OUTPUT, p) for p in rule.modules))
        and not rule.layers
    )


def names_norms(rule: Rule) -> bool:
    """Whether a rule covers norms and names them: by their site, or by a pattern that only norms match."""
    by_site = Site.NORM.value in rule.sites
    by_module = any(pattern.endswith("norm") for pattern in rule.modules)
    return (by_site and (by_module or not rule.modules)) or (by_module and not rule.sites)


def check_iterations(where: str, rule: Rule) -> None:
    """Refuse a range of iterations that is none; `where` is the rule's key.

    Raises:
        ConfigError: names the key.
    """
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
