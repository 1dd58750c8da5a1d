"""Judges what a scheme rounds outside of products: weights and moments as Adam holds them, gradients as they are sent.

What is judged is the tensor in Adam's state after the step, which the next step reads, and the tensor that reaches a
collective of torch.distributed (`quantexp.proof.sending`); not what the code that rounds returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantexp.formats import Place
from quantexp.proof.bits import num_unequal
from quantexp.proof.diagnosis import instead
from quantexp.proof.draws import Randomness
from quantexp.proof.expected import places_of
from quantexp.proof.findings import Finding, Status
from quantexp.proof.image import image, noise_slope
from quantexp.proof.master_weights import (
    AdamStep,
    after_pull,
    after_reset,
    first_change,
    follows,
    num_not_stepped,
    smoothed,
    tracked_after,
    with_error,
)
from quantexp.proof.merging import merged_entry, named_failures
from quantexp.proof.verdict import NOT_FINITE, SlotCalls, compared, judged_entry
from quantexp.quant.outside_products import GRAD_REDUCE, PULL, RESET, SMOOTH, StateSlot
from quantexp.schema import RoundedAt

EACH_HOP = RoundedAt.each_hop.value
#: Why values that a scheme rounds were not judged.
NOT_SENT, NOT_ROUNDED = "no collective has sent it", "no step has rounded it"
_RARE = ("note", "reset")
NOT_YET = "the training ends before the first reset"


@dataclass
class _Seen:
    """The results of one slot on this rank."""

    calls: SlotCalls
    #: Parameter -> what is wrong with it.
    wrong: dict[str, str]
    #: Tensor -> the amax of this rank's part of it, and the stated one that its scale follows from.
    amaxes: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class StateVerdict:
    """The results of all slots, as in `quantexp.proof.verdict.Verdict`."""

    slots: list[StateSlot]
    entries: list[dict[str, object]]
    failures: list[str]
    #: For each slot, as in `_Seen`.
    amaxes: list[dict[str, tuple[float, float]]] = field(default_factory=list)


class StateWatch:
    """Collects the results of one rank in one iteration; a call is a part of a parameter that is rounded at once.

    Args:
        slots: what is judged.
        iteration: when.
        iterations: those of the schedule.
        only: the parameter that is judged, in an iteration that is not proved completely.
    """

    def __init__(
        self, slots: Sequence[StateSlot], iteration: int, iterations: int, only: str | None = None
    ) -> None:
        self._seen = {slot: _Seen(SlotCalls(), {}) for slot in slots}
        self.iteration, self._iterations, self.only = iteration, iterations, only

    def covers(self, slot: StateSlot, name: str) -> bool:
        """Whether a parameter is judged: each one where an observation begins or ends, which is rare."""
        return self.only in (None, name) or self._follows(slot) in _RARE

    def _follows(self, slot: StateSlot) -> str:
        return follows(slot, self.iteration, self._iterations)

    def see(
        self,
        slot: StateSlot,
        name: str,
        x: Tensor,
        before: Tensor,
        amax: Tensor | None,
        place: Place,
        draw: Randomness,
    ) -> None:
        """Compare a matrix of a parameter's elements whose blocks run along its rows.

        Args:
            slot: the declaration.
            name: the parameter's.
            x: the values that were found.
            before: the values before they were rounded.
            amax: of the whole parameter, where its scale depends on it (`scale`).
            place: where the matrix lies in the whole parameter.
            draw: seed and offset of random numbers, if the values depend on them.
        """
        spec = slot.spec
        if slot.product == SMOOTH:
            self._see_slopes(slot, name, x, noise_slope(before, spec, 1, amax))
            return
        positions = places_of(place, tuple(before.shape), before.device) if draw else None
        expected = image(before, spec, -1, amax=amax, positions=positions, **draw)
        # A value that is not finite stays so, also where the format would saturate it.
        expected = torch.where(before.isfinite(), expected, before)
        number = num_unequal(x.detach(), expected)
        finding = compared(x.detach(), before, spec, -1, number, instead)
        seen = self._seen[slot]
        seen.calls.calls += 1
        seen.calls.quantised_calls += finding.quantised
        if finding not in seen.calls.findings:
            seen.calls.findings.append(finding)
        if finding.status is Status.MISMATCH:
            seen.wrong.setdefault(name, finding.reason)

    def _see_slopes(self, slot: StateSlot, name: str, x: Tensor, expected: Tensor) -> None:
        number, seen = num_unequal(x.detach(), expected), self._seen[slot]
        seen.calls.calls += 1
        seen.calls.quantised_calls += 1
        finding = Finding(Status.ENGAGED, quantised=True)
        if number:
            words = f"{number} of {x.numel()} elements are not the slopes of its noise"
            finding = Finding(Status.MISMATCH, words, quantised=True)
            seen.wrong.setdefault(name, words)
        if finding not in seen.calls.findings:
            seen.calls.findings.append(finding)

    def smoothed(
        self,
        slot: StateSlot,
        name: str,
        before: tuple[Tensor, Mapping[str, Tensor], Tensor],
        after: tuple[Tensor, Mapping[str, Tensor]],
        beta: float,
    ) -> None:
        """Compare a gradient and the curvature with what they must become; flat.

        Args:
            slot: the declaration.
            name: the parameter's.
            before: the gradient, what was kept, and the slopes of the noise.
            after: the gradient, and what is kept.
            beta: of the curvature's mean.
        """
        gradient, kept, slopes = before
        strength, wrong = dict(slot.options)["strength"], self._seen[slot].wrong
        last = next(iter(kept.values()), None)
        expected = smoothed(gradient, last, slopes, strength, beta)
        for words, x, y in zip(
            ("curvature", "gradient"), (*after[1].values(), after[0]), expected, strict=True
        ):
            if number := num_unequal(x, torch.from_numpy(y).to(x.device)):
                reason = f"{number} of {len(gradient)} elements of the {words} are wrong"
                wrong.setdefault(name, reason)

    def stepped(
        self,
        slot: StateSlot,
        name: str,
        weights: tuple[Tensor, Tensor],
        moments: tuple[Tensor, Tensor],
        step: AdamStep,
    ) -> None:
        """Compare main weights with AdamW's step from those that were stored; weights before and after, flat."""
        if number := num_not_stepped(*weights, *moments, step):
            words = "weights are not AdamW's step from those that were stored"
            self._seen[slot].wrong.setdefault(name, f"{number} of {len(weights[0])} {words}")

    def fed_back(
        self,
        slot: StateSlot,
        name: str,
        error: Tensor,
        moments: tuple[Tensor, Tensor, Tensor],
        step: AdamStep,
    ) -> None:
        """Compare the first moment with what feedback makes of it.

        Args:
            slot: the declaration.
            name: the parameter's.
            error: what rounding took away of the weights, float64.
            moments: the first one before the error was added to it and after, and the second.
            step: its numbers.
        """
        m, m_after, v = moments
        expected = torch.from_numpy(with_error(m, v, error, step)) if slot.feedback else m
        if number := num_unequal(m_after, expected.to(m.device)):
            words = "are not those with the error of rounding" if slot.feedback else "have changed"
            reason = f"{number} of {len(m)} elements of the first moment {words}"
            self._seen[slot].wrong.setdefault(name, reason)

    def pulled(
        self, slot: StateSlot, name: str, weights: tuple[Tensor, Tensor, Tensor], rate: float
    ) -> None:
        """Compare weights before, rounded, and after they were pulled at a rate; flat."""
        w, rounded, after = weights
        when = self.iteration, self._iterations
        expected = torch.from_numpy(after_pull(w, rounded, slot, when, rate))
        if number := num_unequal(after, expected.to(after.device)):
            reason = f"{number} of {len(w)} weights are not as they must be pulled"
            self._seen[slot].wrong.setdefault(name, reason)

    def followed(
        self,
        slot: StateSlot,
        name: str,
        weights: tuple[Tensor, Tensor, Tensor],
        tracked: Mapping[str, Tensor],
        tracked_later: Mapping[str, Tensor],
    ) -> None:
        """Compare what is tracked of weights that may oscillate, or the weights that are reset.

        Args:
            slot: the declaration.
            name: the parameter's.
            weights: before, rounded, and after; flat.
            tracked: before; empty if nothing was noted.
            tracked_later: after.
        """
        w, rounded, after = weights
        what, wrong = self._follows(slot), self._seen[slot].wrong
        expected, kept = w, [x.cpu().numpy() for x in tracked.values()]
        if what == "reset" and tracked:
            ratio = dict(slot.options)["ratio"]
            expected, kept = torch.from_numpy(after_reset(w, rounded, tracked, ratio)), []
        elif what == "note" or (what == "track" and tracked):
            kept = tracked_after(what, w, rounded, tracked)
        if number := num_unequal(after, expected.to(after.device)):
            wrong.setdefault(name, f"{number} of {len(w)} weights are not as they must be reset")
        pairs = list(zip(tracked_later.values(), map(torch.from_numpy, kept), strict=False))
        differ = sum(num_unequal(x, y.to(x.device)) for x, y in pairs)
        if differ or len(tracked_later) != len(kept):
            wrong.setdefault(name, f"{differ} numbers of what was observed of them are wrong")

    def published(self, slot: StateSlot, name: str, own: Tensor, w: Tensor) -> None:
        """Compare the weights that the model has after a step with the master weights."""
        if number := num_unequal(own, w.to(own.dtype)):
            words = f"{number} of {w.numel()} weights of the model are not the master weights"
            self._seen[slot].wrong.setdefault(name, words)

    def scale(self, slot: StateSlot, tensor: str, own: Tensor, stated: Tensor) -> None:
        """Note the amax that a tensor's scale follows from, and that of this rank's part of it before it was rounded.

        The merged verdict compares the first with the largest of all parts.
        """
        self._seen[slot].amaxes[tensor] = float(own), float(stated)

    def missing(self, slot: StateSlot, name: str) -> None:
        """Record that a parameter's values were not found where they must be."""
        self._seen[slot].wrong.setdefault(name, _absent(slot))

    def left_out(self) -> StateVerdict:
        """The results of a step that was left out, because a value was not finite: a later one must be proved."""
        hidden = {"status": Status.INCONCLUSIVE.value, "reason": NOT_FINITE}
        entries = [judged_entry(slot.record(), None) | hidden for slot in self._seen]
        return StateVerdict(list(self._seen), entries, [])

    def verdict(self) -> StateVerdict:
        """The results of this rank."""
        entries, failures = [], []
        for slot, seen in self._seen.items():
            entry = judged_entry(slot.record(), seen.calls if seen.calls.calls else None)
            if not seen.calls.calls:
                entry["reason"] = _absent(slot)
                if slot.product in (PULL, RESET) and not self._follows(slot):
                    entry |= self._later(slot)
            if seen.wrong and entry["status"] != Status.MISMATCH.value:
                entry |= {
                    "status": Status.MISMATCH.value,
                    "reason": next(iter(seen.wrong.values())),
                }
            entries.append(entry)
            failures += [
                f"{slot} of {name}: declared {slot.spec.fmt.name}, {reason}"
                for name, reason in seen.wrong.items()
            ]
            is_missing = entry["status"] == Status.NOT_REACHED.value
            is_whole = self.only is None or self._follows(slot) in _RARE
            if is_missing and is_whole and slot.product != EACH_HOP:
                failures.append(_not_reached(slot))
        amaxes = [seen.amaxes for seen in self._seen.values()]
        return StateVerdict(list(self._seen), entries, failures, amaxes)

    def _later(self, slot: StateSlot) -> dict[str, str]:
        """Of a slot that is not rounded in this iteration."""
        first = first_change(slot, self._iterations)
        words = NOT_YET if first is None else f"the first {slot.product} is in iteration {first}"
        return {"status": Status.INCONCLUSIVE.value, "reason": words}


def merged_state(verdicts: Sequence[StateVerdict]) -> StateVerdict:
    """One verdict over all ranks, which have the same slots; the last rank of a chain of hops sends nothing."""
    failures = named_failures([verdict.failures for verdict in verdicts])
    failures += _wrong_amaxes(verdicts)
    entries = []
    for slot, *by_rank in zip(
        verdicts[0].slots, *(verdict.entries for verdict in verdicts), strict=True
    ):
        reached = {
            rank: entry
            for rank, entry in enumerate(by_rank)
            if entry["status"] != Status.NOT_REACHED.value
        }
        entries.append(merged_entry(reached or dict(enumerate(by_rank))))
        if not reached and slot.product == EACH_HOP:
            failures.append(_not_reached(slot))
    return StateVerdict(verdicts[0].slots, entries, failures)


def _wrong_amaxes(verdicts: Sequence[StateVerdict]) -> list[str]:
    """The tensors whose stated amax is not the largest of their parts on all ranks."""
    failures = []
    by_slot = zip(*(verdict.amaxes for verdict in verdicts), strict=True)
    for slot, of_ranks in zip(verdicts[0].slots, by_slot, strict=False):
        for tensor in dict.fromkeys(name for amaxes in of_ranks for name in amaxes):
            pairs = [amaxes[tensor] for amaxes in of_ranks if tensor in amaxes]
            largest = max(own for own, _ in pairs)
            wrong = next((stated for _, stated in pairs if stated != largest), None)
            if wrong is not None:
                failures.append(
                    f"{slot} of {tensor}: declared {slot.spec.fmt.name}, its scale is that of an amax of {wrong:.4g}, "
                    f"and its parts have one of {largest:.4g}"
                )
    return failures


def _not_reached(slot: StateSlot) -> str:
    return f"{slot}: declared {slot.spec.fmt.name}, {_absent(slot)}"


def _absent(slot: StateSlot) -> str:
    return NOT_SENT if slot.site == GRAD_REDUCE else NOT_ROUNDED
