"""What enters and leaves the modules of the precision map, seen by the watcher's own hooks.

    linear      x, w -> y     g -> dx, the weight's gradient
    attention   q, k, v -> the softmax's input S and output P -> o     dO -> dP, dS -> dq, dk, dv

Inputs are replaced by views of themselves, so that the gradient of each belongs to this module alone. That changes no
number. What is seen becomes the source of the expected operands (`quantexp.proof.expected`), and what leaves is
compared with their product (`quantexp.proof.products`). How the module computes between its borders does not matter.

A check looks at a few lines of each product, drawn from the seed, the iteration and the micro-batch; a complete one at
more of them, and at all rows by a projection.

    # T tokens, B sequences, H query heads, G key-value heads, R rows of a tile of P
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from quantexp.formats.torch_internals import in_backward
from quantexp.proof.call import Call, Largest
from quantexp.proof.contrast import Contrast
from quantexp.proof.draws import Moment, lines, run_of
from quantexp.proof.expected import is_along_rows
from quantexp.proof.histories import Histories
from quantexp.proof.hooked import Enter, Hooked, InForward, Leave, plain, unseen_hook
from quantexp.proof.lines import Lines
from quantexp.proof.products import Expected, Reference
from quantexp.quant.precision import Entry, ModulePrecision
from quantexp.quant.product_context import ProductContext
from quantexp.quant.sites import FPROP_W, FPROP_X, Operand, Product, Site, Slot, operands_of


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Shares:
    """How the ranks that share a linear layer divide its tensors; the default is one rank."""

    rank: int = 0
    size: int = 1
    #: Whether the output, or the input's gradient, is a sum over the ranks.
    sums_y: bool = False
    sums_dx: bool = False
    #: Whether each rank has its share of the tokens outside of the layer: of those that are summed.
    divides_tokens: bool = False
    gather: Callable[[Tensor], Tensor] = _same
    add: Callable[[Tensor], Tensor] = _same


@dataclass(frozen=True)
class SequenceShares:
    """How context-parallel ranks divide the tokens of attention; the default is one rank."""

    size: int = 1
    #: k or v of all ranks, in the order of the sequence.
    gather: Callable[[Tensor], Tensor] = _same
    add: Callable[[Tensor], Tensor] = _same
    #: The positions in the sequence of the rank's own tokens.
    own: Callable[[int], Tensor] = torch.arange


#: The forward operand of the product that makes each gradient.
CLIPPING = {Product.DGRAD: FPROP_X, Product.WGRAD: FPROP_W}
#: A product of a module.
Unit = tuple[Site, Product]


class Findings(Protocol):
    """Receives the results."""

    def product(
        self, call: Call, site: Site, product: Product, seen: Tensor, expected: Expected | None
    ) -> None:
        """Some elements of a product that left the module, and what they must be; None if they cannot be right."""

    def rows(self, call: Call, site: Site, product: Product, wrong: int, of: int) -> None:
        """So many of all rows of a product do not have its projection."""

    def contrasts(
        self, call: Call, site: Site, product: Product, contrasts: Mapping[str, Contrast]
    ) -> None:
        """How much of its alternatives is in a product that left the module."""

    def other(self, call: Call, label: str, wrong: str) -> None:
        """Something else was compared, named by its label; what is wrong with it, in words."""


@dataclass(frozen=True)
class Extent:
    """How much a check looks at."""

    #: Lines of the left and of the right operand of each product.
    left: int
    right: int
    #: Elements of P that contrasts of fused attention compute; 0 for none.
    probabilities: int


COMPLETE = Extent(16, 64, 1 << 15)
DRAWN = Extent(4, 16, 1 << 12)
WITHOUT_CONTRASTS = replace(DRAWN, probabilities=0)


class Border(Hooked):
    """One module's border while it is watched."""

    def __init__(
        self,
        module: nn.Module,
        declared: ModulePrecision,
        findings: Findings,
        moment: Callable[[], Moment],
        largest: Largest,
        histories: Histories,
        extent: Extent,
        units: Mapping[Unit, int | None] | None = None,
    ) -> None:
        """See `look` for `units`."""
        super().__init__()
        self._runs: dict[Slot, int] = {}
        self._needed: dict[int, frozenset[Operand]] = {}
        self.module, self.declared = module, declared
        self.moment, self.largest, self.histories = moment, largest, histories
        self.look(findings, extent, units)
        #: The call whose forward or backward pass runs, or ran last.
        self.call: Call | None = None
        self.num_calls = 0
        #: The products whose results must be seen to leave.
        self.due: set[tuple[Site, Product]] = set()

    def look(
        self,
        findings: Findings,
        extent: Extent,
        units: Mapping[Unit, int | None] | None = None,
        *,
        is_in_forward: bool = False,
    ) -> None:
        """What to look at when it watches next, and who receives the results.

        Args:
            findings: receives them.
            extent: of each product.
            units: the products, each in one micro-batch (None: in all); None means every product.
            is_in_forward: whether it stands in the module's forward in place of its hooks.
        """
        self.findings, self.extent, self.is_in_forward = findings, extent, is_in_forward
        self._units = units

    def _forget(self) -> None:
        self.call, self.num_calls = None, 0
        self.due.clear()
        self._needed.clear()

    def _stand(self, enter: Enter, leave: Leave, *, prepend: bool = False) -> None:
        """Call `enter` before a forward pass of the module and `leave` after it.

        That is done by hooks, or else in the module's forward, so that the module has no hooks that code could see:
        torch and other libraries take faster paths where there are none. Only hooks see what other hooks change;
        `prepend` calls `leave` before these.
        """
        module = self.module
        enter, leave = plain(enter), plain(leave)
        if self.is_in_forward:
            self._hook(InForward(module, enter, leave))
            return
        self._hook(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._hook(module.register_forward_hook(leave, prepend=prepend))

    @abstractmethod
    def drawn_operands(
        self, context: ProductContext, left: Tensor, right: Tensor
    ) -> Iterator[tuple[Slot, Tensor, Lines]]:
        """The drawn lines of a product's operands, and what they must be."""

    def looks_at(self, unit: Unit, call: Call | None = None) -> bool:
        """Whether a product is looked at, in a call's micro-batch or in any."""
        if self._units is None:
            return True
        if unit not in self._units:
            return False
        index = self._units[unit]
        return call is None or index is None or call.moment.index == index

    def needed(self, call: Call) -> frozenset[Operand]:
        """The operands of the products that are looked at in a call's micro-batch."""
        index = call.moment.index
        if index not in self._needed:
            units = self._units
            if units is None:
                units = dict.fromkeys((slot.site, slot.product) for slot in self.declared.slots)
            self._needed[index] = frozenset(
                slot.operand
                for unit in units
                if self.looks_at(unit, call)
                for slot in (*operands_of(*unit), *self._clipping(unit[1]))
            )
        return self._needed[index]

    def _clipping(self, product: Product) -> tuple[Slot, ...]:
        """The forward operand that a gradient depends on, if its slot clips or has an estimator."""
        slot = CLIPPING.get(product)
        spec = None if slot is None else self.declared.slots.get(slot)
        depends = spec is not None and (spec.clip_gradient or spec.dge is not None)
        return (slot,) if slot is not None and depends else ()

    def _on_gradient(self, x: Tensor, see: Callable[[Tensor], None]) -> None:
        """Call `see` with the gradient of a tensor, unseen by dispatch modes, until the graph is gone."""
        if x.requires_grad:
            x.register_hook(unseen_hook(see))  # type: ignore[no-untyped-call]

    def _require_unchanged(self, call: Call, site: Site, product: Product) -> None:
        """The sources of a product must still be what entered the module."""
        for slot in operands_of(site, product):
            source = call.key(slot)
            if source in call.sources and not call.is_unchanged(source):
                label = Entry(call.module, slot, call.spec(slot)).label
                self.findings.other(call, label, "its source was changed within the module")

    def _begin(self) -> Call:
        self.num_calls += 1
        self.call = Call(self.declared, self.moment(), self.largest, self.histories, in_backward())
        return self.call

    def _scale(self, site: Site, product: Product) -> float:
        part = 1.0
        for spec in map(self.declared.spec, operands_of(site, product)):
            part *= spec.pre_scale * (1.0 if spec.of is None else spec.of.pre_scale)
        return 1.0 / part

    def _picked(self, call: Call, slot: Slot, extent: int) -> Tensor:
        """Lines of an operand."""
        number = self.extent.left if slot.is_left else self.extent.right
        chosen = call.moment.choice(call.module, slot.site, slot.product, slot.operand)
        return lines(chosen, extent, self._run(slot), number)

    def _run(self, slot: Slot) -> int:
        if slot not in self._runs:
            self._runs[slot] = self._run_of(slot)
        return self._runs[slot]

    def _run_of(self, slot: Slot) -> int:
        spec = self.declared.slots.get(slot)
        if spec is None:
            return 1  # of a map of forward products alone
        k_rows = slot.dim in (0, -2)
        run = run_of([spec], [spec.quantised and is_along_rows(slot, spec) is not k_rows])
        return run if spec.of is None else max(run, spec.of.hadamard_block)


def added(expected: Reference, add: Callable[[Tensor], Tensor], size: int) -> Reference:
    """The sum of the parts of all ranks, each rounded, and rounded again as often as they are added."""
    values, rounded, summed, lost = add(
        torch.stack(
            [
                expected.values,
                expected.rounded,
                expected.summed,
                torch.full_like(expected.values, expected.flushed),
            ]
        )
    ).unbind()
    flushed = float(lost.max()) if lost.numel() else 0.0
    largest = add(values.new_zeros(()) + expected.largest)
    return Reference(values, rounded, summed, flushed, expected.roundings + size, largest)


def some_rows(expected: Reference, rows: Tensor | slice) -> Reference:
    """Some of its rows."""
    largest = expected.largest
    if isinstance(largest, Tensor) and largest.dim():
        largest = largest[rows]
    return replace(
        expected,
        largest=largest,
        values=expected.values[rows],
        rounded=expected.rounded[rows],
        sums=expected.summed[rows],
    )
