"""One verdict from those of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from quantexp.proof.findings import Status
from quantexp.proof.verdict import NO_TOKENS, Verdict
from quantexp.quant.precision import PrecisionMap
from quantexp.quant.records import entry_record

#: Why a slot has no calls in a run of several ranks: none of them holds its module.
NOT_BUILT = "no rank holds its module"
_COUNTS = ("calls", "recomputed_calls", "quantised_calls")
_CHECKED = ("product_elements", "product_rows")
_NO_CALLS = {**dict.fromkeys(_COUNTS, 0), "status": Status.NOT_REACHED.value}


def merged(declared: PrecisionMap, verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict of the whole map over all ranks, each of which has the modules that it holds.

    A slot must have been reached on every rank that holds it, and one mismatch on any rank fails the run. Calls are
    summed. A slot counts as engaged if it engaged on one rank and was inconclusive on another, or was that of an expert
    without tokens there. A module that no rank holds fails the run.
    """
    several = len(verdicts) > 1
    rows: dict[tuple[object, ...], dict[int, dict[str, object]]] = {}
    for rank, verdict in enumerate(verdicts):
        for entry in verdict.entries:
            rows.setdefault(_key(entry), {})[rank] = entry
    failures = named_failures([each.failures for each in verdicts])
    entries = []
    for each in (entry for module in declared.values() for entry in module.entries()):
        by_rank = rows.get(_key(entry_record(each)))
        if by_rank is None:
            failures.append(f"{each.label}: declared {each.spec.fmt.name}, {NOT_BUILT}")
            entries.append({**entry_record(each), **_NO_CALLS, "reason": NOT_BUILT})
        else:
            entries.append(merged_entry(by_rank) if several else by_rank[0])
    calls = Counter[str]()
    for verdict in verdicts:
        calls.update(verdict.router_calls)
    products = named_failures([each.product_failures for each in verdicts])
    return Verdict(verdicts[0].iteration, entries, failures, products, dict(calls))


def _key(entry: Mapping[str, object]) -> tuple[object, ...]:
    """What identifies a slot of a module."""
    return tuple(entry[name] for name in ("layer", "module", "site", "product", "operand"))


def named_failures(by_rank: Sequence[Sequence[str]]) -> list[str]:
    """Every distinct failure, with the ranks that have it; of a single rank, its failures."""
    if len(by_rank) == 1:
        return list(by_rank[0])
    ranks_by_failure: dict[str, list[int]] = {}
    for rank, failures in enumerate(by_rank):
        for failure in failures:
            ranks_by_failure.setdefault(failure, []).append(rank)
    return [f"{_named(ranks)}: {failure}" for failure, ranks in ranks_by_failure.items()]


def named_in_order(by_rank: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    """The same of several kinds of failures, one kind after the other."""
    return [failure for kind in zip(*by_rank, strict=True) for failure in named_failures(kind)]


#: The run's status of a slot is the first of these that any rank has.
_WORST_FIRST = (
    Status.MISMATCH,
    Status.NOT_REACHED,
    Status.ENGAGED,
    Status.INCONCLUSIVE,
)


def merged_entry(by_rank: Mapping[int, dict[str, object]]) -> dict[str, object]:
    """The entry of a slot over the ranks that hold it."""
    statuses = {rank: Status(entry["status"]) for rank, entry in by_rank.items()}
    reached = [rank for rank, entry in by_rank.items() if entry["reason"] != NO_TOKENS]
    reached = reached or list(by_rank)
    status = next(s for s in _WORST_FIRST if any(statuses[rank] is s for rank in reached))
    ranks = [rank for rank in reached if statuses[rank] is status]
    reason = str(by_rank[ranks[0]]["reason"])
    everywhere = len(ranks) == len(by_rank)
    return {
        **by_rank[ranks[0]],
        **{
            name: sum(int(str(entry.get(name, 0))) for entry in by_rank.values())
            for name in (*_COUNTS, *_CHECKED)
            if any(name in entry for entry in by_rank.values())
        },
        "status": status.value,
        "reason": reason if everywhere or not reason else f"{_named(ranks)}: {reason}",
    }


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
