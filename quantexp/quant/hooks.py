"""Hooks: callables that receive the tensors and operands of the products.

A module passes (operation, phase, tensor name, tensor) to its hook for each captured tensor name, before quantisation.
`no_hook` is the hook of a module that nobody observes; it costs a call. The products pass each quantised operand to
every hook registered with `hook_operands`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from quantexp.quant.precision import ModulePrecision
from quantexp.quant.sites import Slot

FORWARD, BACKWARD = "forward", "backward"
PRE, POST = "pre", "post"

#: Maps an operand from the layout in which it is multiplied to the one in which its tensor is captured.
Layout = Callable[[Tensor], Tensor]


class TensorHook(Protocol):
    """Receives every tensor of a module; must not modify it."""

    def __call__(self, operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
        """Process one tensor."""


def no_hook(operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
    """The hook of a module that nobody observes."""


def same_layout(x: Tensor) -> Tensor:
    """The layout of an operand that is multiplied as it is captured."""
    return x


class OperandHook(Protocol):
    """Receives every operand of every product; must not modify it."""

    def __call__(
        self,
        precision: ModulePrecision,
        slot: Slot,
        x: Tensor,
        quantised: Tensor,
        layout: Layout,
        /,
    ) -> None:
        """Process one operand.

        Args:
            precision: the module's.
            slot: the operand, of the product about to run.
            x: the operand before quantisation.
            quantised: the tensor that is multiplied, in x's shape.
            layout: maps either to the layout in which the tensor is captured.
        """


#: Whether an operand hook needs an operand now.
OperandFilter = Callable[[ModulePrecision, Slot], bool]


def _all_operands(precision: ModulePrecision, slot: Slot, /) -> bool:
    return True


_operand_hooks: list[tuple[OperandHook, OperandFilter]] = []


@contextlib.contextmanager
def hook_operands(hook: OperandHook, wants: OperandFilter = _all_operands) -> Iterator[None]:
    """Pass the operands of every product called inside to `hook`, including backward passes on other threads.

    `wants` is consulted before an operand is assembled only for hooks; it returns False for operands the hook ignores.
    """
    _operand_hooks.append((hook, wants))
    try:
        yield
    finally:
        _operand_hooks.remove((hook, wants))


def is_operand_hooked(precision: ModulePrecision, slot: Slot) -> bool:
    """Whether any hook needs an operand."""
    return any(wants(precision, slot) for _, wants in _operand_hooks)


def call_operand_hooks(
    precision: ModulePrecision,
    slot: Slot,
    x: Tensor,
    quantised: Tensor,
    layout: Layout = same_layout,
) -> None:
    """Pass one operand to the registered hooks, unless it is empty."""
    if x.numel() == 0:
        return
    for hook, _ in _operand_hooks:
        hook(precision, slot, x, quantised, layout)
