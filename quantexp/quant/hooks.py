"""Where tensors can be looked at: functions that are called with what passes through the products.

A module hands over (operation, phase, tensor name, tensor) for each tensor of the contract, before quantisation,
whether or not anybody looks; `nobody` is the tap of a module that nobody looks at, and costs a call. The products hand
over each operand as they multiply it to whoever asked with `operands_to`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from quantexp.quant.precision import ModulePrecision
from quantexp.quant.sites import Product, Site

FORWARD, BACKWARD = "forward", "backward"
PRE, POST = "pre", "post"

#: From the layout in which an operand is multiplied to the one in which its tensor is captured.
Layout = Callable[[Tensor], Tensor]


class Tap(Protocol):
    """Called with every tensor that passes; must not change it."""

    def __call__(self, operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
        """Look at one tensor."""


def nobody(operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
    """The tap of a module that nobody looks at."""


def as_it_is(x: Tensor) -> Tensor:
    """The layout of an operand that is multiplied as it is captured."""
    return x


class OperandTap(Protocol):
    """Called with every operand of every product; must not change it."""

    def __call__(
        self,
        precision: ModulePrecision,
        site: Site,
        product: Product,
        name: str,
        x: Tensor,
        held: Tensor,
        layout: Layout,
        /,
    ) -> None:
        """Look at one operand.

        Args:
            precision: its module's.
            site: of the product.
            product: that is about to multiply it.
            name: the operand's.
            x: the tensor it was made from.
            held: what is multiplied, in x's shape.
            layout: gives either as the tensor is captured.
        """


#: Whether a tap looks at an operand if it is handed over now.
Wants = Callable[[ModulePrecision, Site, Product, str], bool]


def _every(precision: ModulePrecision, site: Site, product: Product, name: str, /) -> bool:
    return True


_operand_taps: list[tuple[OperandTap, Wants]] = []


@contextlib.contextmanager
def operands_to(tap: OperandTap, wants: Wants = _every) -> Iterator[None]:
    """Hand the operands of every product called inside to `tap`, backward passes on other threads too.

    `wants` is asked where an operand would have to be put together first, and may say no to what the tap drops.
    """
    _operand_taps.append((tap, wants))
    try:
        yield
    finally:
        _operand_taps.remove((tap, wants))


def wants_operand(precision: ModulePrecision, site: Site, product: Product, name: str) -> bool:
    """Whether anybody looks at an operand."""
    return any(wants(precision, site, product, name) for _, wants in _operand_taps)


def tell_operand(
    precision: ModulePrecision,
    site: Site,
    product: Product,
    name: str,
    x: Tensor,
    held: Tensor,
    layout: Layout = as_it_is,
) -> None:
    """Hand one operand to whoever asked for them, unless there is nothing in it."""
    if x.numel() == 0:
        return
    for tap, _ in _operand_taps:
        tap(precision, site, product, name, x, held, layout)
