"""What a planted fault is, and the list of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tests.proof.lies.planting import Planter


class Group(StrEnum):
    """Where a fault comes from."""

    #: Passed or was stopped at commit a51eea9e.
    IMAGE = "operands that are no image of their source"
    HIDDEN = "products hidden from a watcher of operators"
    MOMENT = "faults of a moment, a place or a memory"
    SLOT = "one slot"
    RESULT = "results of products"
    STATE = "random numbers, transforms, delayed scales"
    OPTIMIZER = "what follows a step"
    LAYOUT = "one rank, or a part of a tensor"
    PASS = "validation, recomputation, rules, after going on"
    VENDOR = "silent errors that happened in 2026"


@dataclass(frozen=True)
class Fault:
    """A lie: the label stays, something else runs."""

    name: str
    line: str
    group: Group
    plant: Callable[[Planter], None]
    #: Settings must have one of these; none means that it can be planted in all.
    tags: frozenset[str] = frozenset()
    #: Whether it takes many seconds (a compiler).
    is_slow: bool = False
    #: Whether its acts depend on being watched: then an unproved run does not show its effect.
    needs_watch: bool = False
    #: Whether it changes what the optimizer holds: its effect on a loss or gradient comes in a later iteration.
    is_of_step: bool = False


FAULTS: dict[str, Fault] = {}


def add(
    name: str,
    line: str,
    group: Group,
    plant: Callable[[Planter], None],
    tags: str = "",
    *,
    is_slow: bool = False,
    needs_watch: bool = False,
    is_of_step: bool = False,
) -> None:
    """Put a fault on the list."""
    if name in FAULTS:
        raise ValueError(f"two faults have the name {name}")
    flags = is_slow, needs_watch, is_of_step
    FAULTS[name] = Fault(name, line, group, plant, frozenset(tags.split()), *flags)
