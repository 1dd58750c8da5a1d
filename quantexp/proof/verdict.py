"""The verdict: the precision map, entry by entry, with how often each engaged; and whether the run may go on."""

from __future__ import annotations

from dataclasses import dataclass

from quantexp.errors import EngagementError
from quantexp.proof.judge import NOT_FINITE, Status
from quantexp.proof.watch import ProductWatch, status_of
from quantexp.quant.precision import entry_record


@dataclass(frozen=True)
class Verdict:
    """What one watched iteration proved."""

    iteration: int
    #: The precision map's entries as JSON objects, with calls, recomputed_calls, quantised_calls, status, reason.
    entries: list[dict[str, object]]
    #: Everything that makes the run fail, in words that name the slot.
    failures: list[str]

    @property
    def quantised_calls(self) -> int:
        """Operands of low precision that reached a matrix product, over all slots and calls."""
        return sum(int(str(entry["quantised_calls"])) for entry in self.entries)

    @property
    def proved(self) -> bool:
        """Nothing failed, and no slot was hidden behind values that are not finite."""
        hidden = any(entry["reason"] == NOT_FINITE for entry in self.entries)
        return not self.failures and not hidden

    def record(self) -> dict[str, object]:
        """As precision.json holds it."""
        return {
            "iteration": self.iteration,
            "proved": self.proved,
            "quantised_calls": self.quantised_calls,
            "failures": self.failures,
            "entries": self.entries,
        }


def verdict(iteration: int, watch: ProductWatch) -> Verdict:
    """Hold what was seen against what was declared, both ways round."""
    entries, failures = [], []
    for module in watch.declared.values():
        for entry in module.entries():
            seen = watch.seen.get((entry.module, entry.site, entry.product, entry.name))
            status, reason = status_of(seen)
            entries.append(
                {
                    **entry_record(entry),
                    "calls": seen.calls if seen else 0,
                    "recomputed_calls": seen.recomputed_calls if seen else 0,
                    "quantised_calls": seen.quantised_calls if seen else 0,
                    "status": status.value,
                    "reason": reason,
                }
            )
            if status in (Status.MISMATCH, Status.NOT_REACHED):
                failures.append(f"{entry.label}: declared {entry.operand.format}, {reason}")
    for (owner, operator), calls in watch.undeclared.items():
        failures.append(
            f"{owner}: {calls} matrix products (aten.{operator}) that the precision map does not list"
        )
    return Verdict(iteration, entries, failures)


def require(result: Verdict) -> None:
    """Go on only if what ran is what was declared.

    Raises:
        EngagementError: naming the slots that did not engage as declared, the first three in full.
    """
    if result.failures:
        shown = "; ".join(result.failures[:3])
        more = f"; and {len(result.failures) - 3} more" if len(result.failures) > 3 else ""
        raise EngagementError(
            f"what ran is not what was declared, in iteration {result.iteration}: {shown}{more}. See "
            "precision.json"
        )
