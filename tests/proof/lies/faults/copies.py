"""Faults of copies that a product quantises again: the forward's (`of: forward`) and stored ones."""

from __future__ import annotations

from typing import Any

from tests.proof.lies.planting import Planter

from .fault import Group, add


def _source(name: str, line: str, change: Any) -> None:
    """What a slot with `of` quantises is changed by `change(precision, slot, x, copy)`."""

    def make(planter: Planter) -> Any:
        def replaced(original: Any) -> Any:
            def source_of(precision: Any, slot: Any, x: Any) -> Any:
                copy = original(precision, slot, x)
                if precision.spec(slot).of is None:
                    return copy
                planter.fire()
                return change(precision, slot, x, copy)

            return source_of

        return replaced

    tags = "of-forward of-stored"
    add(name, line, Group.PASS, lambda p: p.function("source_of", make(p)), tags)


def _other_rounding(precision: Any, slot: Any, x: Any, copy: Any) -> Any:
    """A copy that is rounded otherwise than the forward product's, or the stored one."""
    from quantexp.formats import quantise, resolve

    of = precision.spec(slot).of
    rounding = "away" if of.rounding.value == "even" else "even"
    fmt = resolve(of.fmt, rounding=rounding, scale_rule="rceil" if of.fmt.name[0] == "m" else None)
    return quantise(x, fmt, axis=-1)


_source("of high", "high precision is quantised, not the copy", lambda p, s, x, copy: x)


def _along_tokens(precision: Any, slot: Any, x: Any, copy: Any) -> Any:
    """A copy in blocks along tokens, as a product that adds over them would have it."""
    from quantexp.formats import quantise

    return quantise(x, precision.spec(slot).of, axis=0)


_source("of another copy", "the copy is rounded otherwise than in fprop", _other_rounding)
_source("of a copy along tokens", "the copy's blocks run along tokens, not rows", _along_tokens)
