"""The matrix product being called on this thread, set by the code that calls it.

The product functions of `linear` and `attention` enter a context with module, site and product around each matrix
product call. The context changes nothing and proves nothing: the proof of engagement observes the calls themselves,
examines the operands that reach them, and uses the context only to look up the declared slots. A matrix product in the
decoder without a context is itself an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantexp.quant.precision import ModuleId
from quantexp.quant.rows import Rows
from quantexp.quant.sites import Operand, Product, Site, Slot


@dataclass(frozen=True)
class Part:
    """The part of a product that one call computes, if the product takes several calls (attention in tiles)."""

    index: int
    last: bool
    #: Maps a slot to the amax of its whole tensor; None if no scale depends on it.
    amax: Callable[[Slot], Tensor | None] = field(compare=False)


@dataclass(frozen=True)
class ProductContext:
    """The product that the next matrix product call computes."""

    module: ModuleId
    site: Site
    product: Product
    #: Sequences interleaved along the reduced axis ([tokens, sequences] flattened), for products over tokens.
    sequences: int = 1
    #: Both operands before quantisation, in the layout in which they are multiplied. Called only if the proof of
    #: engagement must compare an operand with its source.
    sources: Callable[[], tuple[Tensor, Tensor]] | None = field(default=None, compare=False)
    #: None means the whole product.
    part: Part | None = field(default=None, compare=False)
    #: The working dtype, if a product that is summed with others multiplies in float32 what is representable in it.
    widened_from: torch.dtype | None = None
    #: The rows of a routed expert, whose operands may have a scale for each source.
    rows: Rows | None = field(default=None, compare=False)
    #: Whether the product is recomputed for the backward pass or for an amax.
    recomputed: bool = False


@dataclass(frozen=True)
class FusedContext:
    """The next call is a fused attention kernel, forward or backward, and includes every product of the module."""

    module: ModuleId
    #: q, k and v before quantisation, in the kernel's layout; None if nothing needs them.
    sources: Callable[[], dict[Operand, Tensor]] | None = field(default=None, compare=False)


class _Untracked:
    """Marks products that run only to be captured."""


UNTRACKED = _Untracked()

AnyContext = ProductContext | FusedContext | _Untracked


class _Current(threading.local):
    context: AnyContext | None = None


_current = _Current()


def current_product() -> AnyContext | None:
    """The context of the product being called on this thread, or None."""
    return _current.context


@contextlib.contextmanager
def product_context(context: AnyContext) -> Iterator[None]:
    """Set the context of the matrix product called inside."""
    before = _current.context
    _current.context = context
    try:
        yield
    finally:
        _current.context = before


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


def untracked() -> contextlib.AbstractContextManager[None]:
    """For products that run only to be captured: the proof of engagement ignores them."""
    return product_context(UNTRACKED)
