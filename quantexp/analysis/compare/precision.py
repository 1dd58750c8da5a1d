"""The differences of two precision maps, with slots of the same change grouped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantexp.formats.spec import LEFT_OUT
from quantexp.model.decoder import layer_words
from quantexp.processes.machine import ranges
from quantexp.quant.label import describe_format
from quantexp.quant.records import part_words
from quantexp.quant.sites import Site
from quantexp.quant.slots import WORKING

#: Layer, module, site, product, operand.
_Slot = tuple[int, str, str, str, str]
_NAMES = ("layer", "module", "site", "product", "operand")
#: Options that `settings` shows without their name.
_PLAIN = ("block", "scale_rule", "rounding", "scaling")
#: Keys that do not affect a product's values.
_TOLD = ("calls", "recomputed_calls", "quantised_calls", "status", "reason", "axis")
#: Keys that `part_words` puts into words.
_TAKEN = ("take", "along", "number", "share", "from_error")


@dataclass(frozen=True)
class PrecisionChange:
    """Slots with the same difference between two maps."""

    #: The first iteration of the difference.
    iteration: int
    site: str
    #: Products and operands: `fprop.x`.
    slots: tuple[str, ...]
    baseline: str
    here: str
    layers: str
    modules: tuple[str, ...]
    num_slots: int


def precision_changes(
    here: Mapping[int, Iterable[Mapping[str, Any]]],
    baseline: Mapping[int, Iterable[Mapping[str, Any]]],
    working_here: str | None = None,
    working_baseline: str | None = None,
) -> list[PrecisionChange]:
    """The differences of two maps, by the iterations at which they change, in the terms of `describe_format`.

    Slots in the working precision are alike whatever that is: the configuration says it.
    """
    changes: list[PrecisionChange] = []
    last: list[tuple[_Slot, str, str]] = []
    for iteration in sorted({*here, *baseline}):
        now = _differing(_in_force(here, iteration), _in_force(baseline, iteration))
        if now != last:
            changes += _grouped(iteration, now, working_here, working_baseline) or [
                _alike(iteration)
            ]
        last = now
    return changes


def settings(entry: Mapping[str, Any]) -> str:
    """A slot's format and options: `mxfp8_e4m3 32 rceil even`; those of two slots that differ are different."""
    words = [str(entry.get("format"))]
    words += [str(entry[key]) for key in _PLAIN if entry.get(key) is not None]
    if entry.get("reuse"):
        words.append("(forward copy)")
    known = {*_NAMES, *_PLAIN, *_TOLD, *_TAKEN, "format", "reuse", "parts"}
    words += [f"{k}={v}" for k, v in entry.items() if k not in known and v is not None]
    return ", ".join([" ".join(words), *map(_part, entry.get("parts", ()))])


def _part(part: Mapping[str, Any]) -> str:
    if part["format"] == LEFT_OUT:
        return f"without {part_words(part)}"
    return f"apart {part_words(part)} in {describe_format(settings(part), None)}"


def _in_force(maps: Mapping[int, Iterable[Mapping[str, Any]]], iteration: int) -> dict[_Slot, str]:
    earlier = [at for at in maps if at <= iteration]
    entries = maps[max(earlier)] if earlier else ()
    return {_slot(entry): settings(entry) for entry in entries}


def _slot(entry: Mapping[str, Any]) -> _Slot:
    layer, *names = (entry.get(name) for name in _NAMES)
    module, site, product, operand = map(str, names)
    return int(layer or 0), module, site, product, operand


def _differing(
    here: Mapping[_Slot, str], baseline: Mapping[_Slot, str]
) -> list[tuple[_Slot, str, str]]:
    before = {slot: baseline.get(slot, _absent(slot)) for slot in dict.fromkeys([*baseline, *here])}
    after = {slot: here.get(slot, _absent(slot)) for slot in before}
    return [(slot, before[slot], after[slot]) for slot in before if before[slot] != after[slot]]


def _absent(slot: _Slot) -> str:
    """Of a map without a slot: an output layer that is not quantised is not listed."""
    return WORKING if slot[2] == Site.OUTPUT.value else "no such slot"


def _grouped(
    iteration: int,
    changes: list[tuple[_Slot, str, str]],
    working_here: str | None,
    working_baseline: str | None,
) -> list[PrecisionChange]:
    where: dict[tuple[str, str, str, str], list[tuple[int, str]]] = {}
    for slot, before, after in changes:
        layer, module, site, product, operand = slot
        key = (site, f"{product}.{operand}", before, after)
        where.setdefault(key, []).append((layer, module))
    groups: dict[tuple[str, str, str, tuple[tuple[int, str], ...]], list[str]] = {}
    for (site, slot_name, before, after), places in where.items():
        groups.setdefault((site, before, after, tuple(places)), []).append(slot_name)
    return [
        PrecisionChange(
            iteration,
            site,
            tuple(names),
            describe_format(before, working_baseline),
            describe_format(after, working_here),
            layer_words(ranges(sorted({layer for layer, _ in places})), places[0][1]),
            tuple(dict.fromkeys(module for _, module in places)),
            len(places) * len(names),
        )
        for (site, before, after, places), names in groups.items()
    ]


def _alike(iteration: int) -> PrecisionChange:
    return PrecisionChange(iteration, "all", (), "the same", "the same", "all", (), 0)
