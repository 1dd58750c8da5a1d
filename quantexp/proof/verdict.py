"""Results of operands and products, and from all of them whether the run may continue.

The verdict is the precision map with the calls and status of each entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantexp.errors import EngagementError
from quantexp.formats import QuantSpec
from quantexp.proof.contrast import Contrast, Contrasts
from quantexp.proof.diagnosis import instead
from quantexp.proof.findings import Finding, ProductChecks, Status, largest_magnitude
from quantexp.proof.products import num_wrong
from quantexp.quant.precision import Entry, ModuleId, PrecisionMap, configured
from quantexp.quant.product_context import Part
from quantexp.quant.records import entry_record
from quantexp.quant.sites import Product, Site, Slot, operands_of

if TYPE_CHECKING:
    from quantexp.proof.call import Call
    from quantexp.proof.products import Expected

#: The reason why an operand with NaN or Inf cannot be judged; the next iteration is then watched instead.
NOT_FINITE = "not finite"
#: Why a slot was not reached: its product never ran, which fails the run, or it had nothing to multiply.
NOT_CALLED = "no such product was called"
NO_TOKENS = "no token was routed to this expert"


def compared(
    x: Tensor, source: Tensor, spec: QuantSpec, axis: int, num_differing: int, explain: Explain
) -> Finding:
    """The result for an operand of which so many elements are not those of its source's image.

    `axis` is that of its blocks, for the diagnosis.
    """
    # Without a format, what has the bits of its source is it.
    is_known = not spec.quantised and not num_differing
    is_source = is_known or (x.shape == source.shape and torch.equal(x, source))
    if num_differing:
        words = f"{num_differing} of {x.numel()} elements are not those of its source"
        if spec.quantised and is_source:
            return Finding(Status.MISMATCH, f"{words}: it is not quantised")
        return Finding(Status.MISMATCH, f"{words}{explain(x, source, spec, axis)}", quantised=True)
    is_quantised = spec.quantised and not is_source
    amax = largest_magnitude(source)
    if not bool(amax.isfinite()):
        return Finding(Status.INCONCLUSIVE, NOT_FINITE, quantised=is_quantised)
    if not bool(amax):
        return Finding(Status.INCONCLUSIVE, "all zero")
    if spec.quantised and is_source:
        return Finding(Status.INCONCLUSIVE, "on the grid anyway")
    return Finding(Status.ENGAGED, quantised=is_quantised)


def other_shape(x: Tensor, source: Tensor) -> Finding:
    """The result for an operand that has not the shape of its source."""
    words = f"it has the shape {tuple(x.shape)}, and its source {tuple(source.shape)}"
    return Finding(Status.MISMATCH, words, quantised=True)


#: Says what an operand is instead; its arguments are those of `instead`.
Explain = Callable[[Tensor, Tensor, QuantSpec, int], str]
#: Operands that are explained: messages show three.
_EXPLAINED = 3


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

    def add(self, finding: Finding) -> None:
        """Add a result, unless there is one like it."""
        if finding not in self.findings:
            self.findings.append(finding)


def status_of(slot: SlotCalls | None) -> tuple[Status, str]:
    """The status of a slot from all its calls: one mismatch decides; otherwise one engaged call suffices."""
    if slot is None:
        return Status.NOT_REACHED, NOT_CALLED
    if slot.parts.is_open:
        return CUT_SHORT.status, CUT_SHORT.reason
    for status in (Status.MISMATCH, Status.ENGAGED, Status.INCONCLUSIVE):
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
    #: The modules whose borders are watched, so that each product must be seen to leave.
    bordered: frozenset[ModuleId] = frozenset()
    num_explained: int = 0
    #: Other failures, in words.
    others: list[str] = field(default_factory=list)
    #: What left the modules.
    products: dict[tuple[ModuleId, Site, Product], ProductChecks] = field(default_factory=dict)

    def product(
        self, call: Call, site: Site, product: Product, seen: Tensor, expected: Expected | None
    ) -> None:
        """Some elements of a product that left its module, and what they must be; None if they cannot be right."""
        checks, of = self._checks(call, site, product), seen.numel()
        wrong = of if expected is None else num_wrong(seen, expected())
        checks.elements += of
        if wrong and not checks.wrong:
            words = "elements that left the module are not the product of its operands"
            checks.wrong = f"{wrong} of {of} {words}{_in_micro_batch(call)}"

    def rows(self, call: Call, site: Site, product: Product, wrong: int, of: int) -> None:
        """So many of all rows of a product do not have its projection."""
        checks = self._checks(call, site, product)
        checks.rows += of
        if wrong and not checks.wrong:
            words = "rows that left the module are not those of the product of its operands"
            checks.wrong = f"{wrong} of {of} {words}{_in_micro_batch(call)}"

    def contrasts(
        self, call: Call, site: Site, product: Product, contrasts: Mapping[str, Contrast]
    ) -> None:
        """How much of its alternatives is in a product that left the module."""
        own = self._checks(call, site, product).contrasts
        own.setdefault(call.is_recomputed, Contrasts()).add(contrasts)

    def explain(self, x: Tensor, source: Tensor, spec: QuantSpec, axis: int) -> str:
        """What one of the first wrong operands is instead."""
        self.num_explained += 1
        return instead(x, source, spec, axis) if self.num_explained <= _EXPLAINED else ""

    def other(self, call: Call, label: str, wrong: str) -> None:
        """Something else was compared, named by its label; what is wrong with it, in words."""
        if wrong and not any(each.startswith(f"{label}:") for each in self.others):
            self.others.append(f"{label}: {wrong}{_in_micro_batch(call)}")

    def _checks(self, call: Call, site: Site, product: Product) -> ProductChecks:
        return self.products.setdefault((call.module, site, product), ProductChecks())

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
        slot.add(finding)


@dataclass(frozen=True)
class Verdict:
    """The result of one watched iteration."""

    iteration: int
    #: The precision map's entries as JSON objects, with calls, recomputed_calls, quantised_calls, status, reason.
    entries: list[dict[str, object]]
    #: Everything that fails the run, in messages that name the slot.
    failures: list[str]
    #: What left a module other than it must: it may follow from a failure of another rank.
    product_failures: list[str] = field(default_factory=list)
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
        return not self.failures and not self.product_failures and not hidden

    def record(self) -> dict[str, object]:
        """The content of precision.json."""
        return {
            "iteration": self.iteration,
            "proved": self.proved,
            "quantised_calls": self.quantised_calls,
            "failures": [*self.failures, *self.product_failures],
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
            checks = observed.products.get((entry.module, entry.slot.site, entry.slot.product))
            entries.append(judged_entry(entry_record(entry), slot, checks))
            if status in (Status.MISMATCH, Status.NOT_REACHED) and reason != NO_TOKENS:
                failures.append(f"{entry.label}: declared {entry.spec.fmt.name}, {reason}")
    failures += beside_the_map(observed) + observed.others
    router_calls = {router: slot.calls for router, slot in observed.routers.items()}
    return Verdict(iteration, entries, failures, product_failures(observed), router_calls)


def beside_the_map(observed: Observed) -> list[str]:
    """Products that the map does not list, and routers that are not in high precision."""
    failures = [
        f"{owner}: {calls} matrix products ({operator}) that the precision map does not list"
        for (owner, operator), calls in observed.undeclared.items()
    ]
    for router, slot in observed.routers.items():
        status, reason = status_of(slot if slot.calls else None)
        if status in (Status.MISMATCH, Status.NOT_REACHED):
            failures.append(f"{router}: must be in high precision, {reason}")
    return failures


def product_failures(observed: Observed) -> list[str]:
    """The products that left a module other than they must, or that were not seen to leave it."""
    wrong = [
        f"{product_label(*key)}: {words}"
        for key, checks in observed.products.items()
        if (words := checks.words())
    ]
    multiplied = {
        (module, slot.site, slot.product)
        for (module, slot), calls in observed.slots.items()
        if calls.calls and slot.site is Site.LINEAR and module in observed.bordered
    }
    unseen = sorted(product_label(*key) for key in multiplied - observed.products.keys())
    return wrong + [f"{label}: its result was not seen to leave the module" for label in unseen]


def product_label(module: ModuleId, site: Site, product: Product) -> str:
    """A product as named in every message: `layer 0 fc1 linear.wgrad`."""
    slot = configured(module.name, operands_of(site, product)[0])
    return f"{module} {slot.site.value}.{product.value}"


def _in_micro_batch(call: Call) -> str:
    return f", in micro-batch {call.moment.micro_batch}"


def judged_entry(
    record: Mapping[str, object], slot: SlotCalls | None, product: ProductChecks | None = None
) -> dict[str, object]:
    """An entry of the map with its results; `product` is that of its product, where it left a module."""
    status, reason = status_of(slot)
    return {
        **record,
        "calls": slot.calls if slot else 0,
        "recomputed_calls": slot.recomputed_calls if slot else 0,
        "quantised_calls": slot.quantised_calls if slot else 0,
        **({"product_elements": product.elements, "product_rows": product.rows} if product else {}),
        "status": status.value,
        "reason": reason,
    }


def require(result: Verdict) -> None:
    """Continue only if what ran is what was declared.

    Raises:
        EngagementError: names the slots that did not engage as declared, the first three in full.
    """
    require_none([*result.failures, *result.product_failures], result.iteration)


def require_none(failures: Sequence[str], iteration: int, when: str = "in") -> None:
    """Continue only without failures, as `require`."""
    if failures:
        shown = "; ".join(failures[:3])
        more = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
        raise EngagementError(
            f"what ran is not what was declared, {when} iteration {iteration}: {shown}{more}. See precision.json"
        )
