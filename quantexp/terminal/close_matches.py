"""Suggests known names for a mistyped one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

#: The minimum similarity of a suggestion (difflib's ratio), and the maximum difference from the best one.
_ALIKE, _BEHIND = 0.65, 0.05
#: Separators in a key (`training.lr`), a group (`quant/linear`) or a choice (`more/linear_nvfp4`).
_SEPARATOR = re.compile(r"[./]")


def near(word: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names similar to a word, the most similar first; at most `count`, and none if no name is close.

    The word is compared with the whole name and with its last part, so `iterations` finds `training.iterations`.
    """
    ratios = {name: _ratio(word, name) for name in names}
    best = max(ratios.values(), default=0.0)
    close = [name for name, ratio in ratios.items() if ratio >= max(_ALIKE, best - _BEHIND)]
    if best == 1.0:
        close = [name for name in close if ratios[name] == 1.0]
    return sorted(close, key=lambda name: -ratios[name])[:count]


def did_you_mean(names: Iterable[str]) -> str:
    """`did you mean a, b or c?`; empty without a name."""
    words = one_of(names)
    return f"did you mean {words}?" if words else ""


def one_of(names: Iterable[str], conjunction: str = "or") -> str:
    """`a, b or c`."""
    *others, last = [*names] or [""]
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def _ratio(word: str, name: str) -> float:
    """The similarity, 0 to 1, ignoring case."""
    word, name = word.lower(), name.lower()
    forms = {name, _SEPARATOR.split(name)[-1]}
    return max(SequenceMatcher(None, word, form).ratio() for form in forms)
