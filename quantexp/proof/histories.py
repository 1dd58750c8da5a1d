"""The amax histories of delayed scales, as the watcher knows them.

The amax of a scale in an iteration is the largest of those that the histories had at its start. Their content is
compared from one iteration to the next: each history must have dropped its oldest amax, if it was full, and gained one,
which is the largest that the ranks have seen of that operand, if they have looked at it. An iteration whose step was
left out adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantexp.formats import QuantSpec
from quantexp.quant.step_state import current_state


@dataclass
class Histories:
    """What the watcher knows of the histories of one rank."""

    #: By stream, at the start of the iteration.
    known: dict[str, list[float]] = field(default_factory=dict)
    #: The same, or at the start of an evaluation, when the iteration has ended.
    in_force: dict[str, list[float]] = field(default_factory=dict)
    #: The largest amax that was seen in the iteration, of the operands that were looked at in all their calls.
    seen: dict[str, float] = field(default_factory=dict)
    #: Whether the iteration's amaxes count.
    is_kept: bool = True
    _is_begun: bool = False
    _windows: dict[str, int] = field(default_factory=dict)

    def amax(self, spec: QuantSpec, device: torch.device) -> Tensor | None:
        """The amax that scales an operand; None without a history, so that its own does."""
        amaxes = self.in_force.get(spec.stream)
        return torch.tensor(max(amaxes), device=device) if amaxes else None

    def see(self, spec: QuantSpec, amax: Tensor) -> None:
        """Note the amax of an operand, unless it is a forward copy or belongs to an evaluation."""
        if not spec.reuse and current_state().updates_histories:
            self.seen[spec.stream] = max(float(amax), self.seen.get(spec.stream, 0.0))

    def begin(self, merge: Callable[[Mapping[str, float]], Mapping[str, float]]) -> list[str]:
        """Begin an iteration; what is wrong with the histories since the last one began, in words.

        `merge` makes the largest amax of all ranks of those that each has seen, by stream.
        """
        now = _content()
        wrong = []
        if self._is_begun:
            self.seen = dict(merge(self.seen))
            wrong = [
                f"{stream}: its amax history did not follow from the iteration before"
                for stream in sorted(now | self.known)
                if not self._follows(stream, now.get(stream, []))
            ]
        self.known, self.in_force, self.seen = now, now, {}
        histories = current_state().histories.items()
        self._windows = {stream: history.window for stream, history in histories}
        self._is_begun, self.is_kept = True, True
        return wrong

    def begin_evaluation(self) -> None:
        """Scales follow from what the histories have now."""
        self.in_force = _content()

    def expect(self, content: Mapping[str, list[float]]) -> None:
        """The amaxes that the histories must have when the next iteration begins, which goes on from a checkpoint."""
        self.known, self.is_kept, self._is_begun = dict(content), False, True

    def _follows(self, stream: str, now: list[float]) -> bool:
        history = current_state().histories.get(stream)
        same_window = history is None or history.window == self._windows.get(stream, history.window)
        before = self.known.get(stream, []) if same_window else []
        seen = self.seen.get(stream)
        if not self.is_kept or (seen is None and now == before):
            return now == before
        if history is None or len(now) != min(history.window, len(before) + 1):
            return False
        if now[:-1] != before[len(before) - len(now) + 1 :]:
            return False
        return seen is None or now[-1] == seen


def _content() -> dict[str, list[float]]:
    """The amaxes of every history; the device is read once."""
    histories = current_state().histories
    amaxes = [amax for history in histories.values() for amax in history.amaxes]
    values = torch.stack(amaxes).tolist() if amaxes else []
    content: dict[str, list[float]] = {}
    for stream, history in histories.items():
        number = len(history.amaxes)
        content[stream], values = values[:number], values[number:]
    return content
