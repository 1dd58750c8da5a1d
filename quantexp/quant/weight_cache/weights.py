"""Weights quantised once per step for all micro-batches.

    with copies.step(several=True):         one optimizer step's forward and backward passes, or an evaluation
        copies.for_fprop(precision, w_OI)   rows, blocks along the input width
        copies.for_dgrad(precision, w_OI)   columns, blocks along the output width

    # I input width, O output width

A copy is created in the layer's forward pass, when the weights of the step are in place (after a parameter all-gather).
It belongs to one step, by number, and is dropped at its end, before the optimizer changes the weights;
`quantexp.quant.weight_cache.policy` decides which copies are kept. Outside a step every product quantises its own. The
key of a copy is the module and everything that determines its values: rules that change slots, `reuse`, and different
formats in the two products have separate copies, and formats without blocks share one. A kept copy uses the first
micro-batch's random numbers (`quantexp.quant.step_state`).

A weight that changes while copies of it are kept is an error. The next use detects a change that torch counts;
otherwise a comparison of sampled elements detects it at the end of the step, before the optimizer uses the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.formats.spec import QuantSpec
from quantexp.formats.torch_internals import beside_modes
from quantexp.quant.hooks import is_operand_hooked
from quantexp.quant.multiply import make_operand, quantise_operand, quantise_pair, source_of
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.sharing import is_one_tensor, shares_read
from quantexp.quant.sites import DGRAD_W, FPROP_W, Operand, Product, dim_of
from quantexp.quant.weight_cache.buffers import Buffers
from quantexp.quant.weight_cache.policy import copy_key
from quantexp.quant.whole_amax import whole_amax

#: Elements of a weight compared at the end of a step; the actual number is at most twice this.
SAMPLE = 1024


@dataclass(frozen=True)
class _Weight:
    """A weight at the time its first copy was kept."""

    w: Tensor
    version: int
    sample: Tensor

    @classmethod
    def of(cls, w: Tensor) -> _Weight:
        return cls(w.detach(), w._version, _sample(w).clone())

    def changed_since(self, w: Tensor) -> bool:
        return w._version != self.version or w.data_ptr() != self.w.data_ptr()


class WeightCopies:
    """The quantised weights of all layers in the current step."""

    def __init__(self) -> None:
        #: The number of the current step; copies belong to one step.
        self.number = 0
        #: Whether fprop's and dgrad's copy is used again in this step; None outside steps.
        self._used_again: dict[Product, bool] | None = None
        self._copies: dict[tuple[int, ModuleId, Hashable], Tensor] = {}
        self._weights: dict[ModuleId, _Weight] = {}
        #: Memory for these copies and for those of the products' other operands.
        self.buffers = Buffers()

    @contextlib.contextmanager
    def step(self, several: bool, recomputed: bool = False) -> Iterator[None]:
        """Reuse copies inside; weights must not change.

        Args:
            several: whether the step has several micro-batches.
            recomputed: whether each forward pass runs twice, the second time before its backward pass.

        Raises:
            RuntimeError: at the end, if a weight changed inside.
        """
        self.drop()
        self.number += 1
        self._used_again = {Product.FPROP: several or recomputed, Product.DGRAD: several}
        self.buffers.begin_step()
        try:
            yield
            self._check()
        finally:
            self._used_again = None
            self.drop()
            self.buffers.end_step()

    def drop(self) -> None:
        """Drop every copy: the weights are about to change, or have changed."""
        self._copies.clear()
        self._weights.clear()

    def num_bytes(self) -> int:
        """Bytes of the copies kept now."""
        return sum(x.nbytes for x in {id(x): x for x in self._copies.values()}.values())

    @beside_modes
    def for_fprop(self, precision: ModulePrecision, w_OI: Tensor, dgrad_follows: bool) -> Tensor:
        """The weight quantised for fprop; if a dgrad follows, one read also produces the copy for dgrad.

        Raises:
            RuntimeError: the weight changed since a copy was kept.
        """
        first, second = weight_operands(precision)
        if not first.quantised:
            return w_OI
        if self._used_again is None:
            return _quantised(precision, first, w_OI)
        kept = self._take(precision, Product.FPROP, first, w_OI)
        if kept is not None:
            return kept
        is_kept = self._used_again[Product.FPROP]
        if dgrad_follows and shares_read(first, second):
            both = self._buffers_for_both(precision, w_OI, is_kept)
            amax = whole_amax(precision.module, w_OI, first, _dim(first))
            axes = _dim(first), _dim(second)
            copy, other = quantise_pair(w_OI, first, second, axes, both, amax)
            assert other is not None
            self._keep(precision.module, second, w_OI, other)
        else:
            buffer = self._buffer(precision, first, w_OI, is_kept)
            copy = _quantised(precision, first, w_OI, buffer)
        if is_kept:
            self._keep(precision.module, first, w_OI, copy)
        return copy

    @beside_modes
    def for_dgrad(self, precision: ModulePrecision, w_OI: Tensor) -> Tensor:
        """The weight quantised for dgrad.

        Raises:
            RuntimeError: the weight changed since a copy was kept.
        """
        _, spec = weight_operands(precision)
        if not spec.quantised:
            return w_OI
        if self._used_again is None:
            return _quantised(precision, spec, w_OI)
        copy = self._take(precision, Product.DGRAD, spec, w_OI)
        if copy is None:
            is_kept = self._used_again[Product.DGRAD]
            buffer = self._buffer(precision, spec, w_OI, is_kept)
            copy = _quantised(precision, spec, w_OI, buffer)
            if is_kept:
                self._keep(precision.module, spec, w_OI, copy)
        return copy

    def _buffer(
        self, precision: ModulePrecision, spec: QuantSpec, w: Tensor, is_kept: bool
    ) -> Tensor | None:
        """The buffer for a copy; None means fresh memory, also if a hook may keep the copy."""
        if not spec.quantised or spec.parts or _is_hooked(precision):
            return None
        buffers = self.buffers
        return buffers.for_step(w) if is_kept else buffers.for_next_use("w", w)

    def _buffers_for_both(
        self, precision: ModulePrecision, w: Tensor, is_kept: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Buffers for the two copies of one read, the second of which is kept; a shared copy uses the second."""
        first, second = weight_operands(precision)
        is_shared = is_one_tensor(first, second)
        buffer = None if is_shared else self._buffer(precision, first, w, is_kept)
        return buffer, self._buffer(precision, second, w, is_kept=True)

    def _take(
        self, precision: ModulePrecision, product: Product, spec: QuantSpec, w: Tensor
    ) -> Tensor | None:
        """The kept copy, dropped from the cache if the product has no further use for it."""
        assert self._used_again is not None
        module = precision.module
        key = (self.number, module, copy_key(spec, spec.stream))
        kept = self._copies.get(key)
        if kept is None:
            return None
        if self._weights[module].changed_since(w):
            raise _stale(module)
        if not self._used_again[product]:
            del self._copies[key]
        if _is_hooked(precision):
            self.buffers.disown(kept)
        return kept

    def _keep(self, module: ModuleId, spec: QuantSpec, w: Tensor, copy: Tensor) -> None:
        if not spec.quantised or not spec.once_per_step:
            return
        if module not in self._weights:
            self._weights[module] = _Weight.of(w)
        self._copies[self.number, module, copy_key(spec, spec.stream)] = copy

    @beside_modes
    def _check(self) -> None:
        """Compare the samples of all weights at once: on a GPU the host waits a single time."""
        kept = self._weights
        if not kept:
            return
        before = torch.cat([weight.sample for weight in kept.values()])
        if torch.equal(torch.cat([_sample(weight.w) for weight in kept.values()]), before):
            return
        for module, weight in kept.items():
            if not torch.equal(_sample(weight.w), weight.sample):
                raise _stale(module)


def weight_operands(precision: ModulePrecision) -> tuple[QuantSpec, QuantSpec]:
    """What happens to a linear layer's weight in fprop and in dgrad."""
    return precision.spec(FPROP_W), precision.spec(DGRAD_W)


def _quantised(
    precision: ModulePrecision, spec: QuantSpec, w: Tensor, out: Tensor | None = None
) -> Tensor:
    if spec.parts:
        return make_operand(precision.module, w, spec, _dim(spec))
    if spec.of is not None:
        w = source_of(precision, DGRAD_W, w)
    amax = whole_amax(precision.module, w, spec, _dim(spec))
    return quantise_operand(w, spec, _dim(spec), amax, out=out)


def _dim(spec: QuantSpec) -> int:
    return dim_of(Operand.W, spec)


def _is_hooked(precision: ModulePrecision) -> bool:
    """Whether a hook needs a copy of the weight, and may keep it."""
    return any(is_operand_hooked(precision, slot) for slot in (FPROP_W, DGRAD_W))


def _sample(w: Tensor) -> Tensor:
    """Elements spread over a weight, as bits, so that NaN equals itself."""
    flat = w.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // SAMPLE)]
    return picked.view(torch.int16 if w.element_size() == 2 else torch.int32)


def _stale(module: ModuleId) -> RuntimeError:
    return RuntimeError(
        f"the weight of {module} changed within a step, after it was quantised; change weights only between the steps "
        "of quantexp.quant.weight_cache.weights.WeightCopies"
    )
