"""The matrix product being called on this thread, set by the code that calls it.

The product functions of `linear` and `attention` enter a context with module, site and product around each matrix
product call. The context changes nothing and proves nothing: the proof of engagement observes the calls themselves,
compares the operands that reach them, and uses the context only to look up the declared slots. A matrix product in the
decoder without a context is itself an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quantexp.quant.precision import ModuleId
from quantexp.quant.sites import Product, Site, Slot


@dataclass(frozen=True)
class Part:
    """The part of a product that one call computes, if the product takes several calls (attention in tiles)."""

    index: int
    last: bool
    #: Its queries, and the keys that they are multiplied with.
    rows: slice
    keys: slice
    #: Maps a slot to the amax of its whole tensor; None if no scale depends on it.
    amax: Callable[[Slot], Tensor | None] = field(compare=False)


class ProductContext(NamedTuple):
    """The product that the next matrix product call computes."""

    module: ModuleId
    site: Site
    product: Product
    #: None means the whole product.
    part: Part | None = None
    #: The working dtype, if a product that is summed with others multiplies in float32 what is representable in it.
    widened_from: torch.dtype | None = None
    #: The source of a routed expert's rows (`quantexp.quant.sources`), if the product is that of one alone.
    source: int | None = None
    #: Whether the product is recomputed for the backward pass or for an amax.
    recomputed: bool = False


@dataclass(frozen=True)
class FusedContext:
    """The next call is a fused attention kernel, forward or backward, and includes every product of the module."""

    module: ModuleId


class _Untracked:
    """Marks products that are none of training: those of captures, and those that find a part of an operand."""


UNTRACKED = _Untracked()

AnyContext = ProductContext | FusedContext | _Untracked


class _Current(threading.local):
    context: AnyContext | None = None


_current = _Current()


def current_product() -> AnyContext | None:
    """The context of the product being called on this thread, or None."""
    return _current.context


class product_context:  # noqa: N801  (a context manager, and faster than a generator)
    """Sets the context of the matrix product called inside."""

    def __init__(self, context: AnyContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._before, _current.context = _current.context, self._context

    def __exit__(self, *_: object) -> None:
        _current.context = self._before


#: Receives a product about to be computed, and both operands.
ProductObserver = Callable[[ProductContext, Tensor, Tensor], None]

_observers: dict[ModuleId, list[ProductObserver]] = {}


class ObserverHandle:
    """Shows a module's products to an observer until it is removed, those of backward passes on other threads too."""

    def __init__(self, module: ModuleId, observer: ProductObserver) -> None:
        self._module, self._observer = module, observer
        _observers.setdefault(module, []).append(observer)

    def remove(self) -> None:
        """Show it no more products."""
        _observers[self._module].remove(self._observer)


def show_product(context: ProductContext, left: Tensor, right: Tensor) -> None:
    """Show a product to the observers of its module."""
    for observer in _observers.get(context.module, ()):
        observer(context, left, right)


_watchers = 0


@contextlib.contextmanager
def watch_products() -> Iterator[None]:
    """Mark the products called inside as observed, including those of backward passes on other threads."""
    global _watchers
    _watchers += 1
    try:
        yield
    finally:
        _watchers -= 1


def is_watched() -> bool:
    """Whether products must run as separate torch calls that the proof of engagement can observe."""
    return _watchers > 0


def untracked() -> product_context:
    """For products that are none of training: the proof of engagement ignores them, and sees what they lead to."""
    return product_context(UNTRACKED)
