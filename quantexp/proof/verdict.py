"""The verdict: the precision map with the calls and status of each entry, and whether the run may continue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from quantexp.errors import EngagementError
from quantexp.proof.judge import NOT_FINITE, Status
from quantexp.proof.watch import NO_TOKENS, ProductWatch, status_of
from quantexp.quant.precision import entry_record


@dataclass(frozen=True)
class Verdict:
    """The result of one watched iteration."""

    iteration: int
    #: The precision map's entries as JSON objects, with calls, recomputed_calls, quantised_calls, status, reason.
    entries: list[dict[str, object]]
    #: Everything that fails the run, in messages that name the slot.
    failures: list[str]
    #: Calls of routers' products, which no scheme quantises, by router.
    router_calls: dict[str, int] = field(default_factory=dict)

    @property
    def quantised_calls(self) -> int:
        """Quantised operands that reached a matrix product, over all slots and calls."""
        return sum(int(str(entry["quantised_calls"])) for entry in self.entries)

    @property
    def proved(self) -> bool:
        """Whether nothing failed, and no slot was hidden by values that are not finite."""
        hidden = any(entry["reason"] == NOT_FINITE for entry in self.entries)
        return not self.failures and not hidden

    def record(self) -> dict[str, object]:
        """The content of precision.json."""
        return {
            "iteration": self.iteration,
            "proved": self.proved,
            "quantised_calls": self.quantised_calls,
            "failures": self.failures,
            **({"router_calls": self.router_calls} if self.router_calls else {}),
            "entries": self.entries,
        }


def verdict(iteration: int, watch: ProductWatch) -> Verdict:
    """Compare observed with declared slots, in both directions."""
    entries, failures = [], []
    for module in watch.declared.values():
        for entry in module.entries():
            slot = watch.slots.get((entry.module, entry.slot))
            status, reason = status_of(slot)
            entries.append(
                {
                    **entry_record(entry),
                    "calls": slot.calls if slot else 0,
                    "recomputed_calls": slot.recomputed_calls if slot else 0,
                    "quantised_calls": slot.quantised_calls if slot else 0,
                    "status": status.value,
                    "reason": reason,
                }
            )
            if status in (Status.MISMATCH, Status.NOT_REACHED) and reason != NO_TOKENS:
                failures.append(f"{entry.label}: declared {entry.spec.fmt.name}, {reason}")
    for (owner, operator), calls in watch.undeclared.items():
        failures.append(
            f"{owner}: {calls} matrix products (aten.{operator}) that the precision map does not list"
        )
    for router, slot in watch.routers.items():
        status, reason = status_of(slot if slot.calls else None)
        if status in (Status.MISMATCH, Status.NOT_REACHED):
            failures.append(f"{router}: must be in high precision, {reason}")
    router_calls = {router: slot.calls for router, slot in watch.routers.items()}
    return Verdict(iteration, entries, failures, router_calls)


def merged(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict over all ranks: each must have reached every slot, and one mismatch on any rank fails the run.

    Calls are summed. A slot counts as engaged if it engaged on one rank and was inconclusive on another, or was that
    of an expert without tokens there.
    """
    if len(verdicts) == 1:
        return verdicts[0]
    rows = zip(*(verdict.entries for verdict in verdicts), strict=True)
    ranks_by_failure: dict[str, list[int]] = {}
    for rank, verdict in enumerate(verdicts):
        for failure in verdict.failures:
            ranks_by_failure.setdefault(failure, []).append(rank)
    failures = [f"{_named(ranks)}: {failure}" for failure, ranks in ranks_by_failure.items()]
    calls = Counter[str]()
    for verdict in verdicts:
        calls.update(verdict.router_calls)
    entries = [_merged_entry(row) for row in rows]
    return Verdict(verdicts[0].iteration, entries, failures, dict(calls))


#: The run's status of a slot is the first of these that any rank has.
_WORST_FIRST = (Status.MISMATCH, Status.NOT_REACHED, Status.ENGAGED, Status.INCONCLUSIVE)


def _merged_entry(row: Sequence[dict[str, object]]) -> dict[str, object]:
    statuses = [Status(entry["status"]) for entry in row]
    reached = [rank for rank, entry in enumerate(row) if entry["reason"] != NO_TOKENS] or list(
        range(len(row))
    )
    status = next(s for s in _WORST_FIRST if any(statuses[rank] is s for rank in reached))
    ranks = [rank for rank in reached if statuses[rank] is status]
    reason = str(row[ranks[0]]["reason"])
    everywhere = len(ranks) == len(row)
    counts = ("calls", "recomputed_calls", "quantised_calls")
    return {
        **row[0],
        **{name: sum(int(str(entry[name])) for entry in row) for name in counts},
        "status": status.value,
        "reason": reason if everywhere or not reason else f"{_named(ranks)}: {reason}",
    }


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def require(result: Verdict) -> None:
    """Continue only if what ran is what was declared.

    Raises:
        EngagementError: names the slots that did not engage as declared, the first three in full.
    """
    if result.failures:
        shown = "; ".join(result.failures[:3])
        more = f"; and {len(result.failures) - 3} more" if len(result.failures) > 3 else ""
        raise EngagementError(
            f"what ran is not what was declared, in iteration {result.iteration}: {shown}{more}. See "
            "precision.json"
        )
