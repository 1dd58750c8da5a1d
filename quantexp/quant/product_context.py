"""Which matrix product is being called right now, said by the code that calls it.

The product functions of `linear` and `attention` announce the module, site and product around the one call that
multiplies. Announcing changes nothing and proves nothing: the proof of engagement watches the calls themselves,
looks at the operands that reach them, and uses the announcement only to know which slots to hold them against. A
matrix product in the decoder that nobody announced is itself a finding.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantexp.quant.precision import ModuleId
from quantexp.quant.sites import Product, Site


@dataclass(frozen=True)
class Part:
    """Which part of a product a call makes, where one product takes several calls (attention in tiles)."""

    index: int
    last: bool
    #: The working dtype: a product that is summed over its parts multiplies in float32 what holds in this.
    dtype: torch.dtype
    #: By an operand's name, the amax of the whole tensor that it is a part of; None where no scale follows from that.
    amax: Callable[[str], Tensor | None] = field(compare=False)


@dataclass(frozen=True)
class Announcement:
    """The product that the next matrix product call belongs to."""

    module: ModuleId
    site: Site
    product: Product
    #: Sequences interleaved along the reduced axis ([tokens, sequences] flattened), for products over tokens.
    sequences: int = 1
    #: Both operands as they were before anything was done to them, in the layout in which they are multiplied. Asked
    #: for only where the proof of engagement has to hold an operand against what it was made from.
    sources: Callable[[], tuple[Tensor, Tensor]] | None = field(default=None, compare=False)
    #: None is the whole product.
    part: Part | None = field(default=None, compare=False)
    #: Whether the product was made before and is made again, for what follows from it.
    again: bool = False


@dataclass(frozen=True)
class FusedAnnouncement:
    """The next call is attention by a fused kernel, forward or backward, with every product of the module in it."""

    module: ModuleId
    #: q, k and v as they were before anything was done to them, as the kernel gets them; None where nobody needs them.
    sources: Callable[[], dict[str, Tensor]] | None = field(default=None, compare=False)


class _Observation:
    """What is multiplied next is looked at and enters nothing."""


OBSERVATION = _Observation()

Said = Announcement | FusedAnnouncement | _Observation


class _Current(threading.local):
    announcement: Said | None = None


_current = _Current()


def current() -> Said | None:
    """What this thread has announced, if anything."""
    return _current.announcement


@contextlib.contextmanager
def announce(announcement: Said) -> Iterator[None]:
    """Say that the matrix product called inside is this one."""
    before = _current.announcement
    _current.announcement = announcement
    try:
        yield
    finally:
        _current.announcement = before


_watchers = 0


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """The products called inside are looked at, those of backward passes on other threads too."""
    global _watchers
    _watchers += 1
    try:
        yield
    finally:
        _watchers -= 1


def is_watched() -> bool:
    """Whether products have to be made where they can be seen: one by one, by calls of torch."""
    return _watchers > 0


def observing() -> contextlib.AbstractContextManager[None]:
    """Around products made only to be captured: the forward and backward passes have no part in them."""
    return announce(OBSERVATION)
