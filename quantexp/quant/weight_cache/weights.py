"""A layer's weights, quantised once a step for all of its micro-batches.

    with copies.step(several=True):         one optimizer step's forward and backward passes, or an evaluation
        copies.for_fprop(precision, w_OI)   rows, blocks along the input width
        copies.for_dgrad(precision, w_OI)   columns, blocks along the output width

    # I input width, O output width

A copy is made at the layer's forward, when the weights of the step are in place (a parameter all-gather included),
belongs to one step by its number, and is dropped with it, before the optimizer changes the weights; what is kept how
long, `quantexp.quant.weight_cache.policy` says. Outside of a step every product makes its own. A copy is kept by module
and by all that decides its values, so that rules that change slots, `reuse`, and different formats in the two products
each have their own, and formats without blocks one for both. Random numbers of a kept copy are the first micro-batch's
(`quantexp.quant.step_state`).

A weight that changes while copies of it are kept is an error: found at the next use where torch counts the change,
and else, by a sample of its elements, when the step ends, which is before the optimizer uses the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.quant.hooks import wants_operand
from quantexp.quant.operand import held, held_by_two, linear_dim
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.sites import Product, Site
from quantexp.quant.slots import Operand
from quantexp.quant.weight_cache.buffers import Buffers
from quantexp.quant.weight_cache.policy import form, is_one_tensor, shares_read

#: Elements of a weight that are compared at the end of a step, at most twice as many.
SAMPLE = 1024


@dataclass(frozen=True)
class _Weight:
    """A weight as it was when a copy of it was first kept."""

    w: Tensor
    version: int
    sample: Tensor

    @classmethod
    def of(cls, w: Tensor) -> _Weight:
        return cls(w.detach(), w._version, _sample(w).clone())

    def changed_since(self, w: Tensor) -> bool:
        return w._version != self.version or w.data_ptr() != self.w.data_ptr()


class WeightCopies:
    """The quantised weights of the step at work, of all layers."""

    def __init__(self) -> None:
        #: Counts the steps; no copy of one serves another.
        self.number = 0
        #: Whether what fprop and what dgrad multiplies has a further use in this step; None outside of steps.
        self._again: dict[Product, bool] | None = None
        self._copies: dict[tuple[int, ModuleId, Hashable], Tensor] = {}
        self._weights: dict[ModuleId, _Weight] = {}
        #: Memory for these copies and for those of a product's other operand.
        self.buffers = Buffers()

    @contextlib.contextmanager
    def step(self, several: bool, recomputed: bool = False) -> Iterator[None]:
        """Inside, weights do not change and their copies serve again.

        Args:
            several: whether several micro-batches pass.
            recomputed: whether each forward pass runs twice, the second time before its backward.

        Raises:
            RuntimeError: at the end, weights that changed inside.
        """
        self.drop()
        self.number += 1
        self._again = {Product.FPROP: several or recomputed, Product.DGRAD: several}
        self.buffers.begin_step()
        try:
            yield
            self._check()
        finally:
            self._again = None
            self.drop()
            self.buffers.end_step()

    def drop(self) -> None:
        """Forget every copy: the weights are about to change, or have."""
        self._copies.clear()
        self._weights.clear()

    def num_bytes(self) -> int:
        """What the copies that are kept now take."""
        return sum(x.nbytes for x in {id(x): x for x in self._copies.values()}.values())

    def for_fprop(self, precision: ModulePrecision, w_OI: Tensor, dgrad_follows: bool) -> Tensor:
        """The weight as fprop multiplies it; where a dgrad follows, from one read with what that will multiply.

        Raises:
            RuntimeError: the weight changed since a copy was kept.
        """
        first, second = weight_operands(precision)
        if self._again is None:
            return held(w_OI, first, -1)
        kept = self._take(precision, Product.FPROP, first, w_OI)
        if kept is not None:
            return kept
        is_kept = self._again[Product.FPROP]
        if dgrad_follows and shares_read(first, second):
            both = self._room_for_both(precision, w_OI, is_kept)
            copy, other = held_by_two(w_OI, first, second, (-1, linear_dim(second)), both)
            assert other is not None
            self._keep(precision.module, second, w_OI, other)
        else:
            copy = held(w_OI, first, -1, out=self._room(precision, first, w_OI, is_kept))
        if is_kept:
            self._keep(precision.module, first, w_OI, copy)
        return copy

    def for_dgrad(self, precision: ModulePrecision, w_OI: Tensor) -> Tensor:
        """The weight as dgrad multiplies it.

        Raises:
            RuntimeError: the weight changed since a copy was kept.
        """
        _, operand = weight_operands(precision)
        if self._again is None:
            return held(w_OI, operand, linear_dim(operand))
        copy = self._take(precision, Product.DGRAD, operand, w_OI)
        if copy is None:
            is_kept = self._again[Product.DGRAD]
            room = self._room(precision, operand, w_OI, is_kept)
            copy = held(w_OI, operand, linear_dim(operand), out=room)
            if is_kept:
                self._keep(precision.module, operand, w_OI, copy)
        return copy

    def _room(
        self, precision: ModulePrecision, operand: Operand, w: Tensor, is_kept: bool
    ) -> Tensor | None:
        """Where to write a copy; None is fresh memory, and so it is where a tap may hold on to the copy."""
        if not operand.quantised or operand.depends_on_moment or _is_shown(precision):
            return None
        buffers = self.buffers
        return buffers.until_the_step_ends(w) if is_kept else buffers.until_the_next("w", w)

    def _room_for_both(
        self, precision: ModulePrecision, w: Tensor, is_kept: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Where to write the two copies of one read, the second of which is kept; where they are one, to that alone."""
        first, second = weight_operands(precision)
        one = is_one_tensor(first, second)
        room = None if one else self._room(precision, first, w, is_kept)
        return room, self._room(precision, second, w, is_kept=True)

    def _take(
        self, precision: ModulePrecision, product: Product, operand: Operand, w: Tensor
    ) -> Tensor | None:
        """The copy that is kept, and from now on no more where the product has no further use for it."""
        assert self._again is not None
        module = precision.module
        key = (self.number, module, form(operand, operand.stream))
        kept = self._copies.get(key)
        if kept is None:
            return None
        if self._weights[module].changed_since(w):
            raise _stale(module)
        if not self._again[product]:
            del self._copies[key]
        if _is_shown(precision):
            self.buffers.give_away(kept)
        return kept

    def _keep(self, module: ModuleId, operand: Operand, w: Tensor, copy: Tensor) -> None:
        if not operand.quantised or not operand.once_a_step:
            return
        if module not in self._weights:
            self._weights[module] = _Weight.of(w)
        self._copies[self.number, module, form(operand, operand.stream)] = copy

    def _check(self) -> None:
        """Compare the weights with what they were, all of them at once: on a GPU the host waits one time."""
        kept = self._weights
        if not kept:
            return
        before = torch.cat([weight.sample for weight in kept.values()])
        if torch.equal(torch.cat([_sample(weight.w) for weight in kept.values()]), before):
            return
        for module, weight in kept.items():
            if not torch.equal(_sample(weight.w), weight.sample):
                raise _stale(module)


def weight_operands(precision: ModulePrecision) -> tuple[Operand, Operand]:
    """A linear layer's weight in fprop and in dgrad."""
    return (
        precision.operand(Site.LINEAR, Product.FPROP, "w"),
        precision.operand(Site.LINEAR, Product.DGRAD, "w"),
    )


def _is_shown(precision: ModulePrecision) -> bool:
    """Whether a tap looks at a copy of the weight, and may hold on to it."""
    products = (Product.FPROP, Product.DGRAD)
    return any(wants_operand(precision, Site.LINEAR, product, "w") for product in products)


def _sample(w: Tensor) -> Tensor:
    """Elements spread over a weight, as bits: NaN equals itself."""
    flat = w.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // SAMPLE)]
    return picked.view(torch.int16 if w.element_size() == 2 else torch.int32)


def _stale(module: ModuleId) -> RuntimeError:
    return RuntimeError(
        f"the weight of {module} changed within a step, after it was quantised: what changes weights belongs between "
        "the steps of quantexp.quant.weight_cache.weights.WeightCopies"
    )
