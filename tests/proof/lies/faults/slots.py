"""One slot at a time: each of the 18 is another tensor than declared, in the one product that has it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantexp.quant.sites import Site, slots_of
from tests.proof.lies.planting import ALWAYS, Operand, When, Where

from .fault import Group, add
from .moments import other_than_declared


def _noise(o: Operand) -> Tensor:
    return o.image(o.planter.noise(o.x))


def _reversed(o: Operand) -> Tensor:
    return o.copy.flip(0)


def _a_row(o: Operand) -> Tensor:
    """One row, of those that a check in parts may not draw."""
    copy = o.copy.clone()
    rows = copy.view(-1, copy.shape[-1]) if copy.is_contiguous() else copy.flatten(0, -2)
    index = len(rows) // 3
    rows[index] = -rows[index]
    return rows.view(copy.shape)


CHANGES: dict[str, tuple[str, Callable[[Operand], Tensor | None], When]] = {
    "undeclared": ("is not what is declared", other_than_declared, ALWAYS),
    "noise": ("is the image of noise", _noise, ALWAYS),
    "negated": ("is negated", lambda o: -o.copy, ALWAYS),
    "doubled": ("is doubled", lambda o: o.copy * 2, ALWAYS),
    "reversed": ("is reversed in its first dimension", _reversed, ALWAYS),
    "a row": ("has one row negated", _a_row, ALWAYS),
    "zero": ("is zero", lambda o: torch.zeros_like(o.copy), ALWAYS),
    "negated from 2": ("is negated from iteration 2 on", lambda o: -o.copy, When(since=2)),
}


def _add(
    name: str, slot: str, words: str, change: Callable[[Operand], Tensor | None], when: When
) -> None:
    add(
        f"{slot} {name}",
        f"{slot} {words}",
        Group.SLOT,
        lambda planter: planter.operands(change, Where(slots=slot), when),
    )


for _site in (Site.LINEAR, Site.QK, Site.PV):
    for _slot in slots_of(_site):
        for _name, (_words, _change, _when) in CHANGES.items():
            _add(_name, str(_slot), _words, _change, _when)
