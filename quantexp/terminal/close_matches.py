"""Which known names a mistyped one may stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

#: How alike two words must be to be suggested (difflib's ratio), and how far below the best another may be.
_ALIKE, _BEHIND = 0.65, 0.05
#: What parts a key (`training.lr`), a group (`quant/linear`) or a choice (`more/linear_nvfp4`).
_SEPARATOR = re.compile(r"[./]")


def near(word: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names that a word may stand for, the likeliest first; at most `count`, and none if nothing is close.

    A name is compared as a whole and by its last part, so `iterations` finds `training.iterations`.
    """
    ratios = {name: _ratio(word, name) for name in names}
    best = max(ratios.values(), default=0.0)
    close = [name for name, ratio in ratios.items() if ratio >= max(_ALIKE, best - _BEHIND)]
    if best == 1.0:
        close = [name for name in close if ratios[name] == 1.0]
    return sorted(close, key=lambda name: -ratios[name])[:count]


def did_you_mean(names: Iterable[str]) -> str:
    """`did you mean a, b or c?`, or nothing where there is no name."""
    words = one_of(names)
    return f"did you mean {words}?" if words else ""


def one_of(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *others, last = [*names] or [""]
    return f"{', '.join(others)} or {last}" if others else last


def _ratio(word: str, name: str) -> float:
    """How alike they are, 0 to 1, capitals or not."""
    word, name = word.lower(), name.lower()
    forms = {name, _SEPARATOR.split(name)[-1]}
    return max(SequenceMatcher(None, word, form).ratio() for form in forms)
