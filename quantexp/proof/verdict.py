"""Judges each operand of a matrix product, and from all operands whether the run may continue.

An operand must lie on the grid of its slot's format, and no other format may have produced it (see `grids`). The
verdict is the precision map with the calls and status of each entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantexp.errors import EngagementError
from quantexp.formats import Family, QuantSpec
from quantexp.formats.layout import in_memory_order, memory_order
from quantexp.processes.threads import threads
from quantexp.proof.by_source import by_contains, by_source
from quantexp.proof.candidates import Grid
from quantexp.proof.grids import Finding, Status, which_grid
from quantexp.proof.origin import FAR, distance, needs_origin, scale_amax
from quantexp.proof.windows import windows_of
from quantexp.quant.precision import Entry, ModuleId, PrecisionMap
from quantexp.quant.product_context import Part
from quantexp.quant.records import entry_record
from quantexp.quant.sites import Slot

#: The reason why an operand with NaN or Inf cannot be judged; the next iteration is then watched instead.
NOT_FINITE = "not finite"
#: Why a slot was not reached: its product never ran, which fails the run, or it had nothing to multiply.
NOT_CALLED = "no such product was called"
NO_TOKENS = "no token was routed to this expert"


def judge(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    source: Tensor | None = None,
    whole_amax: Tensor | None = None,
) -> Finding:
    """Compare one operand with its declaration.

    Args:
        x: the operand that reached the product.
        spec: its declaration.
        axis: the dimension of x that the declared blocks run along.
        source: the operand before quantisation, in x's shape; required if `needs_origin` (see `origin`). An operand
            in the working precision must equal it, if it is there.
        whole_amax: if x is part of a tensor whose scale depends on its amax, the amax of the whole tensor.
    """
    amax = _amax(x) if x.numel() else None
    if amax is None or amax == 0:
        return Finding(Status.INCONCLUSIVE, "all zero")
    if not torch.isfinite(amax):
        return Finding(Status.INCONCLUSIVE, NOT_FINITE)
    if needs_origin(spec) and source is None:
        return Finding(
            Status.MISMATCH,
            "its source before quantisation is missing, and it cannot be judged without",
        )
    if spec.fmt.family is Family.GRID:
        assert source is not None
        return by_source(x, spec, axis, source, whole_amax)
    if spec.fmt.family is Family.PYTHON:
        assert source is not None
        return by_contains(x, spec, axis, source)
    if not spec.quantised and source is not None and not torch.equal(x, source.to(x.dtype)):
        differ = int((x != source.to(x.dtype)).sum())
        return Finding(
            Status.MISMATCH,
            f"{differ} of {x.numel()} elements are not those before quantisation",
            quantised=True,
        )
    declared = Grid(spec) if spec.quantised else None
    declared_amax = amax
    if declared is not None:
        if whole_amax is not None:
            declared_amax = whole_amax
        elif source is not None and (known := scale_amax(spec, source, axis)) is not None:
            declared_amax = known
        if off := declared.num_off(x, declared_amax, axis):
            return Finding(
                Status.MISMATCH,
                f"{off} of {x.numel()} elements are not on the grid of {spec.fmt.name}",
            )
    if spec.is_transformed and source is not None:
        far = distance(x, spec, source, axis)
        if not far < FAR:
            return Finding(
                Status.MISMATCH,
                f"it is not the {spec.hadamard.value} Hadamard transform of its source: their relative distance is "
                f"{far:.2f}",
                quantised=True,
            )
    windows = windows_of(x, axis, spec.block)
    with threads(1):
        return which_grid(windows, amax, spec.fmt.name, declared, declared_amax)


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude, float32; NaN if there is NaN. `torch.linalg.vector_norm` takes 20 times as long.

    So does `torch.aminmax` of a transposed tensor.
    """
    low, high = torch.aminmax(in_memory_order(x, memory_order(x)))
    return torch.maximum(high, -low).to(torch.float32)


@dataclass
class Parts:
    """The parts of one operand whose product takes several calls.

    A scale of the whole tensor follows from no single part, so the code that multiplies states the tensor's amax with
    every part. That statement is verified: the largest amax of the parts' sources must equal the stated one.
    """

    quantised: bool = False
    #: Whether more parts are to come.
    is_open: bool = False
    #: The largest amax of the parts' sources, 0-dim float32.
    amax: Tensor | None = None

    def observe(self, amax: Tensor) -> None:
        """Include the amax of a part."""
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)

    def mismatch(self, stated: Tensor, reduce: Callable[[Tensor], Tensor]) -> Finding | None:
        """After the last part: a mismatch if the stated amax is not that of all parts.

        `reduce` takes the amax of this rank's parts to that of the whole tensor.
        """
        assert self.amax is not None
        amax = reduce(self.amax)
        if torch.equal(amax, stated.to(amax)):
            return None
        return Finding(
            Status.MISMATCH,
            f"its scale is that of an amax of {float(stated):.4g}, and its parts have one of {float(amax):.4g}",
            quantised=True,
        )


#: The result for a product whose last part never ran, so that the stated amax could not be verified.
CUT_SHORT = Finding(Status.MISMATCH, "the last part of its product was never multiplied")


@dataclass
class SlotCalls:
    """The results of one slot over all calls."""

    calls: int = 0
    #: Calls with an empty operand: an expert without tokens.
    empty_calls: int = 0
    recomputed_calls: int = 0
    quantised_calls: int = 0
    findings: list[Finding] = field(default_factory=list)
    #: Progress of the product that is being computed in parts.
    parts: Parts = field(default_factory=Parts)


def worst(findings: Sequence[Finding]) -> Finding:
    """The result for an operand of several tensors, none of which may be a mismatch: one that engaged suffices."""
    order = (Status.MISMATCH, Status.ENGAGED, Status.DECLARED, Status.INCONCLUSIVE)
    return min(findings, key=lambda finding: order.index(finding.status))


def status_of(slot: SlotCalls | None) -> tuple[Status, str]:
    """The status of a slot from all its calls: one mismatch decides; otherwise one engaged call suffices."""
    if slot is None:
        return Status.NOT_REACHED, NOT_CALLED
    if slot.parts.is_open:
        return CUT_SHORT.status, CUT_SHORT.reason
    for status in (Status.MISMATCH, Status.ENGAGED, Status.DECLARED, Status.INCONCLUSIVE):
        for finding in slot.findings:
            if finding.status is status:
                return status, finding.reason
    return Status.NOT_REACHED, NO_TOKENS if slot.empty_calls else NOT_CALLED


@dataclass
class Observed:
    """The matrix products of one watched iteration."""

    #: The declaration of every slot.
    declared: PrecisionMap
    #: Results of the routers' products, by router.
    routers: dict[str, SlotCalls]
    slots: dict[tuple[ModuleId, Slot], SlotCalls] = field(default_factory=dict)
    #: Products without a context: (owner, operator) -> calls.
    undeclared: Counter[tuple[str, str]] = field(default_factory=Counter)

    def slot(self, entry: Entry) -> SlotCalls:
        """The results of a slot."""
        return self.slots.setdefault((entry.module, entry.slot), SlotCalls())

    def note(
        self, entry: Entry, finding: Finding, recomputed: bool, part: Part | None = None
    ) -> None:
        """Add a call; a product in parts counts as one call, and as quantised if any of its parts was."""
        slot = self.slot(entry)
        if part is None or part.index == 0:
            slot.recomputed_calls += recomputed
            slot.calls += not recomputed
        if finding.quantised and not recomputed and not (part and slot.parts.quantised):
            slot.quantised_calls += 1
        slot.parts.quantised |= finding.quantised
        if finding not in slot.findings:
            slot.findings.append(finding)


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
        return sum(
            int(str(entry["quantised_calls"]))
            for entry in self.entries
            if entry["layer"] is not None  # it is for what is rounded outside of products
        )

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


def verdict(iteration: int, observed: Observed) -> Verdict:
    """Compare observed with declared slots, in both directions."""
    entries, failures = [], []
    for module in observed.declared.values():
        for entry in module.entries():
            slot = observed.slots.get((entry.module, entry.slot))
            status, reason = status_of(slot)
            entries.append(judged_entry(entry_record(entry), slot))
            if status in (Status.MISMATCH, Status.NOT_REACHED) and reason != NO_TOKENS:
                failures.append(f"{entry.label}: declared {entry.spec.fmt.name}, {reason}")
    for (owner, operator), calls in observed.undeclared.items():
        failures.append(
            f"{owner}: {calls} matrix products ({operator}) that the precision map does not list"
        )
    for router, slot in observed.routers.items():
        status, reason = status_of(slot if slot.calls else None)
        if status in (Status.MISMATCH, Status.NOT_REACHED):
            failures.append(f"{router}: must be in high precision, {reason}")
    router_calls = {router: slot.calls for router, slot in observed.routers.items()}
    return Verdict(iteration, entries, failures, router_calls)


def judged_entry(record: Mapping[str, object], slot: SlotCalls | None) -> dict[str, object]:
    """An entry of the map with its results."""
    status, reason = status_of(slot)
    return {
        **record,
        "calls": slot.calls if slot else 0,
        "recomputed_calls": slot.recomputed_calls if slot else 0,
        "quantised_calls": slot.quantised_calls if slot else 0,
        "status": status.value,
        "reason": reason,
    }


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
