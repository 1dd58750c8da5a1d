"""What an oracle is: another implementation that rounds to elements, or that quantises whole blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from quantexp.formats.verify.exact import KINDS, Answer, Case, answer
from quantexp.formats.verify.grids import Rounder, nearest

Array = NDArray[Any]


@dataclass(frozen=True)
class Opinion:
    """What an oracle says about a case, and where that counts."""

    answer: Answer
    #: elements, and blocks, where it follows the definition; None is everywhere.
    known: Array | None = None
    known_blocks: Array | None = None


def _no(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Oracle:
    """Another implementation, by what it can be asked."""

    #: of its package.
    name: str
    version: str
    #: the value of each code of an element, float32; None where it does not have the element.
    code_values: Callable[[str], Array | None] = _no
    #: whether it can round to an element, by ties (`even` or `away`), and saturating or not.
    can_round: Callable[[str, str, bool], bool] = lambda element, ties, saturate: False
    #: element, magnitudes (float64), whether to saturate, ties: magnitudes on the grid, or what overflow gives.
    rounded: Callable[[str, Array, bool, str], Array] = _no  # type: ignore[assignment]
    #: what it makes of a whole case, given the gold's answer; None where it cannot be asked.
    blocks: Callable[[Case, Answer], Opinion | None] = _no

    def opinion(self, case: Case, gold: Answer) -> Opinion | None:
        """What this oracle says; where it only knows elements, its rounding stands in for the gold's."""
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
