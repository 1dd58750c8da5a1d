"""The check of every iteration that is not proved completely: a few lines of a few products.

Which products these are, `turns` says. The product functions show their operands; the borders see what the modules make
of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from quantexp.formats.torch_internals import unseen
from quantexp.model.decoder import is_routed
from quantexp.proof.bits import are_equal, num_unequal
from quantexp.proof.border import Border
from quantexp.proof.call import Call
from quantexp.proof.contrast import Contrast, Contrasts
from quantexp.proof.hooked import Hooked
from quantexp.proof.lines import Lines, make
from quantexp.proof.objective import Objective
from quantexp.proof.products import Expected, are_right, num_wrong
from quantexp.proof.verdict import Observed, product_label
from quantexp.proof.watch import ProductWatch
from quantexp.quant.precision import Entry, ModuleId
from quantexp.quant.product_context import (
    FusedContext,
    ObserverHandle,
    ProductContext,
    current_product,
)
from quantexp.quant.sites import Product, Site, Slot

#: A product of a module.
_Unit = tuple[ModuleId, Site, Product]


@dataclass
class DrawnChecks:
    """What was looked at in one or more passes, and what was wrong.

    Elements are kept. What they must be is made at the end, and all are compared together: that takes few operations,
    whose code and data then lie in the processor's caches, and waits for a device once.
    """

    #: Elements of operands, and of products that left their modules.
    operands: int = 0
    products: int = 0
    slots: set[tuple[ModuleId, Slot]] = field(default_factory=set)
    #: The first of each kind, in words that name the slot.
    failures: dict[str, str] = field(default_factory=dict)
    #: The products that were seen to leave each module.
    left: set[tuple[ModuleId, Product]] = field(default_factory=set)
    #: What was seen, in which micro-batch, and what makes the elements that it must have.
    _operands: list[tuple[Entry, int, Tensor, Lines]] = field(default_factory=list)
    _results: list[tuple[_Unit, int, Tensor, Expected]] = field(default_factory=list)
    #: By the label of their product, and whether the pass was recomputed.
    _contrasts: dict[tuple[str, bool], Contrasts] = field(default_factory=dict)
    #: The labels of failures of products.
    _products: set[str] = field(default_factory=set)

    def operand(self, call: Call, slot: Slot, seen: Tensor, expected: Lines) -> None:
        """Some elements of an operand, and what they must be."""
        entry = Entry(call.module, slot, call.spec(slot))
        self._operands.append((entry, call.moment.micro_batch, seen, expected))

    def product(
        self, call: Call, site: Site, product: Product, seen: Tensor, expected: Expected | None
    ) -> None:
        """See `Findings`."""
        self.products += seen.numel()
        self.left.add((call.module, product))
        of, micro_batch = (call.module, site, product), call.moment.micro_batch
        if expected is None:
            self._wrong_product(of, micro_batch, seen.numel(), seen.numel())
        else:
            self._results.append((of, micro_batch, seen, expected))

    def contrasts(
        self, call: Call, site: Site, product: Product, contrasts: Mapping[str, Contrast]
    ) -> None:
        """See `Findings`."""
        key = product_label(call.module, site, product), call.is_recomputed
        self._contrasts.setdefault(key, Contrasts()).add(contrasts)

    def rows(self, call: Call, site: Site, product: Product, wrong: int, of: int) -> None:
        """A drawn check makes no projections."""

    def other(self, call: Call, label: str, wrong: str) -> None:
        """See `Findings`."""
        if wrong:
            self._fail(label, wrong, call.moment.micro_batch)

    def settle(self) -> None:
        """Compare what was seen."""
        make(lines for *_, lines in self._operands)
        operands = [(seen, lines()) for _, _, seen, lines in self._operands]
        results = [(seen, expected()) for _, _, seen, expected in self._results]
        self.operands += sum(seen.numel() for seen, _ in operands)
        self.slots |= {(entry.module, entry.slot) for entry, *_ in self._operands}
        if not (are_equal(operands) and are_right(results)):
            for (entry, micro_batch, *_), pair in zip(self._operands, operands, strict=True):
                self._compare(entry, micro_batch, *pair)
            for (of, micro_batch, *_), (seen, expected) in zip(self._results, results, strict=True):
                if wrong := num_wrong(seen, expected):
                    self._wrong_product(of, micro_batch, wrong, seen.numel())
        for (label, _), each in self._contrasts.items():
            if words := each.words():
                self._products.add(label)
                self.failures.setdefault(label, f"{label}: {words}")
        self._operands.clear()
        self._results.clear()
        self._contrasts.clear()

    def _compare(self, entry: Entry, micro_batch: int, seen: Tensor, expected: Tensor) -> None:
        if seen.shape != expected.shape:
            words = f"it has lines of {seen.shape[1]} elements, and its source {expected.shape[1]}"
        elif wrong := num_unequal(seen, expected):
            words = f"{wrong} of {seen.numel()} drawn elements are not those of its source"
        else:
            return
        self._fail(entry.label, f"declared {entry.spec.fmt.name}, {words}", micro_batch)

    def _wrong_product(self, of: _Unit, micro_batch: int, wrong: int, number: int) -> None:
        label = product_label(*of)
        self._products.add(label)
        words = "that left the module are not the product of its operands"
        self._fail(label, f"{wrong} of {number} drawn elements {words}", micro_batch)

    def in_order(self) -> tuple[list[str], list[str]]:
        """The failures, and those of products, which may follow from another rank's operand."""
        own = [words for label, words in self.failures.items() if label not in self._products]
        return own, [self.failures[label] for label in self.failures if label in self._products]

    def _fail(self, label: str, words: str, micro_batch: int) -> None:
        self.failures.setdefault(label, f"{label}: {words}, in micro-batch {micro_batch}")


class DrawnWatch(Hooked):
    """Watches some modules in one iteration, or in an evaluation."""

    def __init__(self, checks: DrawnChecks, borders: dict[ModuleId, Border]) -> None:
        super().__init__()
        self.checks, self._borders = checks, borders

    def _install(self) -> None:
        for name, border in self._borders.items():
            border.__enter__()
            self._hook(border)
            self._hook(ObserverHandle(name, self._see))

    def finish(self) -> None:
        """Compare what was seen; what should have left the modules and did not is a failure."""
        self._require_all()
        for border in reversed(self._borders.values()):
            border.finish()
        with unseen():
            self.checks.settle()

    def _forget(self) -> None:
        """The borders forget."""

    def _see(self, context: ProductContext, left: Tensor, right: Tensor) -> None:
        border = self._borders[context.module]
        if not border.looks_at((context.site, context.product), border.call):
            return
        with unseen():
            if not left.numel() or not right.numel():
                return
            for slot, own, expected in border.drawn_operands(context, left, right):
                assert border.call is not None
                self.checks.operand(border.call, slot, own, expected)

    def _require_all(self) -> None:
        for name, border in self._borders.items():
            missing = [
                unit
                for unit in border.due
                if border.looks_at(unit) and (name, unit[1]) not in self.checks.left
            ]
            if (border.num_calls and not missing) or is_routed(name.name):
                continue  # an expert may have no tokens
            if not border.num_calls:
                self.checks.failures.setdefault(str(name), f"{name}: its module was not called")
            for site, product in sorted(missing, key=str):
                label = product_label(name, site, product)
                words = f"{label}: its result was not seen to leave the module"
                self.checks.failures.setdefault(label, words)


class LayerWatch(ProductWatch):  # type: ignore[no-untyped-call]
    """Sees, in forward passes of one layer, products that the map does not list, those of its routers, and what lies
    between its modules.
    """

    def __init__(
        self,
        observed: Observed,
        name: str,
        layer: nn.Module,
        routers: Mapping[str, nn.Module],
        layers: Sequence[Hooked],
        objective: Objective,
    ) -> None:
        super().__init__(observed, {}, {name: layer}, routers, None, layers, objective)
        self._layer = layer

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the layer inside."""
        handles = [
            self._layer.register_forward_pre_hook(self._begin),
            self._layer.register_forward_hook(self._end, always_call=True),
        ]
        try:
            with contextlib.ExitStack() as stack:
                for router in self._routers.values():
                    stack.enter_context(router.watching())
                for layer in self._layers:
                    stack.enter_context(layer)
                with self._owners.watching():
                    yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, *_: object) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: object) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _lookup(self, table: Tensor) -> None:
        """It is drawn elsewhere."""

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(current_product(), FusedContext):
            super()._fused(func, args, kwargs)

    def _in_context(
        self, context: ProductContext, left: Tensor, right: Tensor, alpha: float
    ) -> None:
        """It is drawn elsewhere."""
