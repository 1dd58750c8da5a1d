"""When a rule is in force, and which slots of a module it covers. Needs no torch.

A rule with a condition (`when`) has no iterations of its own, and is not in force. Once the run's metrics meet the
condition, `Conditions` gives it those from the next iteration on.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

from quantexp.errors import ConfigError
from quantexp.model.decoder import OUTPUT
from quantexp.quant.sites import Site, Slot
from quantexp.schema import QuantConfig, Rule, When

#: Rules with a condition of a scheme: each may be in force or not beside all others.
_MOST_CONDITIONS = 4


def changes(quant: QuantConfig) -> list[int]:
    """The iterations, from 1, at which the map may change; 1 is always included.

    Those at which a condition is met are not known before.
    """
    points = {1}
    for rule in quant.rules:
        if rule.iterations:
            first, last = rule.iterations
            points.add(first or 1)
            if last is not None:
                points.add(last + 1)
    return sorted(points)


def is_in_force(rule: Rule, iteration: int) -> bool:
    """Whether a rule applies at an iteration (from 1); one whose condition is not met applies at none."""
    if rule.when is not None and not rule.iterations:
        return False
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


def check_conditions(quant: QuantConfig) -> None:
    """Refuse conditions that no metric can meet, beside iterations, or more than can be planned for.

    Raises:
        ConfigError: names the key.
    """
    conditional = [(n, rule, rule.when) for n, rule in enumerate(quant.rules) if rule.when]
    for number, rule, when in conditional:
        where = f"quant.rules[{number}].when"
        if rule.iterations or rule.share:
            raise ConfigError(
                f"{where} is in place of iterations and share: the condition says when; drop one of them"
            )
        bounds = [bound for bound in (when.below, when.above) if bound is not None]
        if len(bounds) != 1 or not math.isfinite(bounds[0]):
            raise ConfigError(
                f"{where} needs one finite bound, below or above, got below={when.below} and above={when.above}"
            )
    if len(conditional) > _MOST_CONDITIONS:
        raise ConfigError(
            f"quant.rules must have at most {_MOST_CONDITIONS} rules with a condition (when), got {len(conditional)}"
        )


def condition_words(when: When) -> str:
    """`grad_norm is below 0.5 in the mean of 20 iterations, from iteration 100 on`."""
    side, bound = ("below", when.below) if when.below is not None else ("above", when.above)
    words = f"{when.measure.value} is {side} {bound:g}"
    if when.over > 1:
        unit = "evaluations" if when.measure.value == "validation_loss" else "iterations"
        words += f" in the mean of {when.over} {unit}"
    return words + (f", from iteration {when.after} on" if when.after > 1 else "")


def switches(quant: QuantConfig, iteration: int, met: Iterable[int] | None) -> Iterator[str]:
    """What follows an iteration that met the conditions of these rules, in words."""
    for index in met or ():
        when = quant.rules[index].when
        assert when is not None
        words = condition_words(when)
        yield f"quant.rules[{index}] is in force from iteration {iteration + 1} on: {words}"


def variants(quant: QuantConfig) -> Iterator[QuantConfig]:
    """The scheme with each set of its conditions met from the first iteration on, but for the empty set."""
    conditional = [index for index, rule in enumerate(quant.rules) if rule.when is not None]
    for number in range(1, len(conditional) + 1):
        for met in combinations(conditional, number):
            yield with_rule(quant, *met)


def with_rule(quant: QuantConfig, *met: int) -> QuantConfig:
    """The scheme with the conditions of these rules met from the first iteration on."""
    rules = [
        replace(rule, iterations=[1, None]) if index in met else rule
        for index, rule in enumerate(quant.rules)
    ]
    return replace(quant, rules=rules)


class Conditions:
    """The conditions of a scheme while a run trains: gives a rule its iterations once its condition is met.

    Args:
        quant: the run's scheme, whose rules change.
        lines: the lines of metrics.jsonl that the run has already, in order.
    """

    def __init__(self, quant: QuantConfig, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._rules = quant.rules
        self._seen: dict[int, deque[float]] = {
            index: deque(maxlen=rule.when.over)
            for index, rule in enumerate(quant.rules)
            if rule.when is not None
        }
        for line in lines:
            self.see(line)

    def see(self, line: Mapping[str, Any]) -> list[int]:
        """Take the metrics of an iteration; returns the indices of the rules whose conditions it is the first to meet.

        A value that is missing or not finite does not count.
        """
        met = []
        for index, values in self._seen.items():
            rule, iteration = self._rules[index], int(line["iteration"])
            when = rule.when
            assert when is not None
            value = line.get(when.measure.value)
            if rule.iterations or value is None or not math.isfinite(value):
                continue
            values.append(float(value))
            if iteration >= when.after and _is_met(when, values):
                rule.iterations = [iteration + 1, None]
                met.append(index)
        return met


def _is_met(when: When, values: deque[float]) -> bool:
    if len(values) < when.over:
        return False
    mean = math.fsum(values) / len(values)
    return mean < when.below if when.below is not None else mean > (when.above or 0.0)


def as_switched(quant: QuantConfig, lines: Iterable[Mapping[str, Any]]) -> QuantConfig:
    """The scheme of a run with the iterations at which its conditions were met, and without conditions.

    A rule whose condition was not met goes: it was in force in no iteration.
    """
    known = copy.deepcopy(quant)
    Conditions(known, lines)
    met = [rule for rule in known.rules if rule.when is None or rule.iterations]
    return replace(known, rules=[replace(rule, when=None) for rule in met])


def fill_shares(quant: QuantConfig, iterations: int) -> None:
    """Give rules with shares of the training their iterations.

    Raises:
        ConfigError: names the rule.
    """
    for index, rule in enumerate(quant.rules):
        if not rule.share:
            continue
        where = f"quant.rules[{index}]"
        if len(rule.share) != 2 or not 0 <= rule.share[0] < rule.share[1] <= 1:
            raise ConfigError(
                f"{where}.share must be [first, last] with 0 <= first < last <= 1, got {rule.share}"
            )
        first, last = (round(share * iterations) for share in rule.share)
        if first == last:
            raise ConfigError(
                f"{where}.share {rule.share} is less than half an iteration of training.iterations={iterations}"
            )
        own = [first + 1, None if rule.share[1] == 1 else last]
        if rule.iterations not in ([], own):
            raise ConfigError(
                f"{where} must have iterations or share, not both, got {rule.iterations} and {rule.share}"
            )
        rule.iterations = list(own)
