"""The table of `docs/proof.md`: a line for each fault."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .faults import FAULTS, Group

if TYPE_CHECKING:
    from .bench import Outcome

_EFFECTIVE = ("named", "late", "passed")


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Counts of all pairs, then the faults by group."""
    counts = Counter(each.status.value for each in outcomes)
    effective = sum(counts[name] for name in _EFFECTIVE)
    lines = [
        f"{len({each.fault for each in outcomes})} faults in {len({each.setting for each in outcomes})} settings: "
        f"{effective} pairs with an effect on the numbers, of which the proof names {counts['named']} in the iteration "
        f"in which the effect begins and {counts['late']} later; {counts['passed']} pass. Without an effect: "
        f"{counts['no effect']}, and {counts['named without effect']} that are named all the same. "
        f"{counts['crashed']} end with another error; {counts['not there']} have no place in their setting.",
    ]
    by_fault: dict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        by_fault[each.fault].append(each)
    for group in Group:
        names = [n for n, fault in FAULTS.items() if fault.group is group and n in by_fault]
        if not names:
            continue
        lines += ["", f"**{group.value[0].upper()}{group.value[1:]}**", ""]
        lines += [
            "| fault | | effect in | named in time | late | passes in |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_line(name, by_fault[name]) for name in names]
    return "\n".join(lines) + "\n"


def _line(name: str, outcomes: Sequence[Outcome]) -> str:
    effective = [each for each in outcomes if each.status.value in _EFFECTIVE]
    by_status = {
        status: [each.setting for each in effective if each.status.value == status]
        for status in _EFFECTIVE
    }
    crashed = [each.setting for each in outcomes if each.status.value == "crashed"]
    passed = ", ".join(by_status["passed"])
    if crashed:
        passed += f" (another error: {', '.join(crashed)})"
    late = ", ".join(by_status["late"])
    text = FAULTS[name].line
    return f"| {name} | {text} | {len(effective)} | {len(by_status['named'])} | {late} | {passed} |"
