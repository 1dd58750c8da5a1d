"""The precision map with its proof, with equal slots in one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantexp.analysis.compare.precision import settings
from quantexp.analysis.tensors.place import experts_as_one
from quantexp.model.decoder import layer_words
from quantexp.processes.machine import ranges
from quantexp.quant.label import describe_format
from quantexp.quant.slots import WORKING
from quantexp.runs.precision import proof_word

#: Maximum rows of the table; a map with a rule for each slot has more.
MAX_ROWS = 400


@dataclass(frozen=True)
class ProofRow:
    """Slots of one module and product with equal settings and proof."""

    layers: str
    module: str
    site: str
    slot: str
    settings: str
    is_quantised: bool
    status: str
    reason: str
    calls: int
    num_slots: int


@dataclass(frozen=True)
class Proof:
    """The content of precision.json; `proved` is None without a proof."""

    proved: bool | None
    words: str
    failures: tuple[str, ...] = ()
    rows: tuple[ProofRow, ...] = ()
    left_out: int = 0
    #: As `quantexp.runs.precision.proof_word`.
    word: str | None = None


def proof(
    precision: Mapping[str, Any] | None,
    declared: Sequence[Mapping[str, Any]],
    working: str | None = None,
) -> Proof:
    """The proof, or the declared map if the run ended before its proof; `working` is the run's precision."""
    if precision is None:
        rows = _rows(declared, working)
        words = "no proof: the run has no precision.json" + ("; the map as declared" * bool(rows))
        return Proof(None, words, (), tuple(rows[:MAX_ROWS]), max(0, len(rows) - MAX_ROWS))
    entries = [entry for entry in precision.get("entries") or () if isinstance(entry, dict)]
    rows = _rows(entries, working)
    return Proof(
        bool(precision.get("proved")),
        _words(precision, entries, working),
        tuple(str(failure) for failure in precision.get("failures") or ()),
        tuple(rows[:MAX_ROWS]),
        max(0, len(rows) - MAX_ROWS),
        proof_word(precision),
    )


def _words(
    precision: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], working: str | None
) -> str:
    quantised = [entry for entry in entries if entry.get("format") != WORKING]
    counts = Counter(str(entry.get("status")) for entry in quantised)
    engaged = counts.pop("engaged", 0)
    others = "".join(f", {count} {status}" for status, count in counts.most_common())
    return (
        f"in iteration {precision.get('iteration')}: {engaged} of {len(quantised)} quantised slots engaged{others}, "
        f"{len(entries) - len(quantised)} slots {describe_format(WORKING, working)}, "
        f"{precision.get('quantised_calls')} quantised operands seen at the matrix products{_drawn(precision)}"
    )


def _drawn(precision: Mapping[str, Any]) -> str:
    """What was compared after that iteration, in words."""
    drawn = precision.get("drawn")
    if not isinstance(drawn, dict) or not drawn.get("last"):
        return ""
    return (
        f"; up to iteration {drawn['last']}: {drawn.get('operands', 0):,} drawn elements of operands in "
        f"{drawn.get('slots', 0)} slots and {drawn.get('products', 0):,} of products compared"
    )


def _rows(entries: Sequence[Mapping[str, Any]], working: str | None) -> list[ProofRow]:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for entry in entries:
        module = experts_as_one(str(entry.get("module")))
        slot = f"{entry.get('product')}.{entry.get('operand')}"
        key = (module, str(entry.get("site")), slot, describe_format(settings(entry), working))
        verdict = (str(entry.get("status") or "declared"), str(entry.get("reason") or ""))
        groups.setdefault((*key, *verdict), []).append(entry)
    return [_row(key, alike) for key, alike in groups.items()]


def _layers(alike: Sequence[Mapping[str, Any]]) -> set[int]:
    """Empty for what is rounded outside of products."""
    return {int(entry["layer"]) for entry in alike if entry.get("layer") is not None}


def _row(key: tuple[str, ...], alike: Sequence[Mapping[str, Any]]) -> ProofRow:
    module, site, slot, how, status, reason = key
    return ProofRow(
        layers=layer_words(ranges(sorted(_layers(alike))) or "all", module),
        module=module,
        site=site,
        slot=slot,
        settings=how,
        is_quantised=alike[0].get("format") != WORKING,
        status=status,
        reason=reason,
        calls=sum(int(entry.get("calls") or 0) for entry in alike),
        num_slots=len(alike),
    )
