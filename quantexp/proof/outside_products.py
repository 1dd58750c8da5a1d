"""Judges what a scheme rounds outside of products: moments as Adam holds them, gradients as a rank sends them.

What is judged is the tensor in Adam's state after the step, which the next step reads, and the tensor that reaches a
collective of torch.distributed, seen by a TorchDispatchMode; not what the code that rounds returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantexp.formats import Place
from quantexp.model.finite import tensors_in
from quantexp.proof.bits import num_unequal
from quantexp.proof.diagnosis import instead
from quantexp.proof.draws import Randomness
from quantexp.proof.expected import places_of
from quantexp.proof.findings import Status
from quantexp.proof.image import image
from quantexp.proof.merging import merged_entry, named_failures
from quantexp.proof.verdict import NOT_FINITE, SlotCalls, compared, judged_entry
from quantexp.quant.outside_products import GRAD_REDUCE, StateSlot
from quantexp.schema import RoundedAt

EACH_HOP = RoundedAt.each_hop.value
#: Why values that a scheme rounds were not judged.
NOT_SENT, NOT_ROUNDED = "no collective has sent it", "no step has rounded it"
#: The operators of torch.distributed that send a tensor to be summed, by the beginning of their names.
_SENDING = ("allreduce", "reduce_scatter", "_reduce_scatter", "send")


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
    """Collects the results of one rank in one iteration; a call is a part of a parameter that is rounded at once."""

    def __init__(self, slots: Sequence[StateSlot]) -> None:
        self._seen = {slot: _Seen(SlotCalls(), {}) for slot in slots}

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
            if entry["status"] == Status.NOT_REACHED.value and slot.product != EACH_HOP:
                failures.append(_not_reached(slot))
        amaxes = [seen.amaxes for seen in self._seen.values()]
        return StateVerdict(list(self._seen), entries, failures, amaxes)


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


class SendWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds gradients in the tensors that reach torch.distributed's collectives.

    Args:
        expected: by name, a tensor whose memory must lie in one of the tensors that are sent.
        sent: is called with the name when it is, before the tensor is sent.
    """

    def __init__(self, expected: Mapping[str, Tensor], sent: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._expected, self._sent = dict(expected), sent

    @property
    def left(self) -> list[str]:
        """The names that no collective has sent yet."""
        return list(self._expected)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__.startswith(_SENDING):
            for _, tensor in tensors_in(args):
                for name in [name for name, x in self._expected.items() if _lies_in(x, tensor)]:
                    del self._expected[name]
                    self._sent(name)
        return func(*args, **(kwargs or {}))


def _lies_in(x: Tensor, sent: Tensor) -> bool:
    """Whether a contiguous tensor's memory lies within another's."""
    if x.device != sent.device:
        return False
    start, size = sent.data_ptr(), sent.numel() * sent.element_size()
    return start <= x.data_ptr() and x.data_ptr() + x.numel() * x.element_size() <= start + size
