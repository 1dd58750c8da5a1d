"""The interface of an oracle: another implementation that rounds to elements, or that quantises whole blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from quantexp.extras.verify.exact import KINDS, Answer, Case, answer
from quantexp.extras.verify.grids import Rounder, nearest

Array = NDArray[Any]


@dataclass(frozen=True)
class Opinion:
    """An oracle's result for a case, and where it is comparable."""

    answer: Answer
    #: Elements, and blocks, for which it follows the definition; None means all.
    known: Array | None = None
    known_blocks: Array | None = None


def _no(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Oracle:
    """Another implementation and its capabilities."""

    #: Name of its package.
    name: str
    version: str
    #: Returns the value of each code of an element, float32; None if it does not have the element.
    code_values: Callable[[str], Array | None] = _no
    #: Whether it can round to an element, for a rule for ties (`even` or `away`), and saturating or not.
    can_round: Callable[[str, str, bool], bool] = lambda element, ties, saturate: False
    #: Maps element, magnitudes (float64), whether to saturate, and ties to magnitudes on the grid or overflow results.
    rounded: Callable[[str, Array, bool, str], Array] = _no  # type: ignore[assignment]
    #: Its result for a whole case, given the gold's; None if it does not support the case.
    blocks: Callable[[Case, Answer], Opinion | None] = _no

    def opinion(self, case: Case, gold: Answer) -> Opinion | None:
        """The oracle's result; if it only knows elements, its rounding replaces the gold's."""
        own = self.blocks(case, gold)
        if own is not None:
            return own
        element, saturate = KINDS[case.fmt][1], bool(case.options.get("saturate", True))
        if not self.can_round(element, case.rounding, saturate):
            return None
        scales = self._rounder("even") if self.can_round("e4m3", "even", True) else nearest
        return Opinion(answer(case, self._rounder(case.rounding), scales))

    def _rounder(self, ties: str) -> Rounder:
        return lambda element, v, saturate: self.rounded(element, v, saturate, ties)
