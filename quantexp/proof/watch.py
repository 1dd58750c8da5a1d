"""Observes every matrix product of the decoder, and of the modules beside it in the map, where it is called.

A `TorchDispatchMode` around forward and backward sees each call below autograd, in our autograd functions and in any
other code, with the operands that reach it. The context that our product functions set determines which slots the
operands are compared with. A product that a decoder module calls without a context is recorded under that module and
fails the run. The table of a tied embedding is judged like an operand where it is looked up. Products outside the
map's modules (the loss, an output layer that no scheme quantises) are not checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quantexp.formats import Axis, QuantSpec, resolve
from quantexp.formats.torch_internals import in_backward
from quantexp.model.decoder import is_routed
from quantexp.proof.grids import Finding, Status
from quantexp.proof.origin import BY_SOURCE, needs_origin
from quantexp.proof.owners import Owners
from quantexp.proof.verdict import CUT_SHORT, Observed, Parts, SlotCalls, judge, worst
from quantexp.quant.precision import Entry, PrecisionMap
from quantexp.quant.product_context import (
    UNTRACKED,
    FusedContext,
    Part,
    ProductContext,
    current_product,
    watch_products,
)
from quantexp.quant.rows import Rows
from quantexp.quant.sites import LOOKUP_W, Operand, Product, operands_of
from quantexp.quant.slots import WORKING
from quantexp.quant.sources import as_source, differs_by_source
from quantexp.quant.whole_amax import is_reduced, own_amax, reduced, whole_amax

#: Operators that multiply two matrices (or stacks of them), with the positions of left and right operand.
PAIRED = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2)}
#: Operators that multiply in another way; our products never call them.
OTHER = (
    "mv",
    "addmv",
    "linear",
    "matmul",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "einsum",
)
FUSED_ATTENTION = "_scaled_dot_product"
#: Operators that look up rows of their first argument.
LOOKUPS = ("embedding", "index", "index_select")


#: The declaration of a tensor in high precision.
_HIGH = resolve(WORKING)

#: The arguments of a fused call that are operands; P and dS are internal to the kernel.
_FUSED_ARGUMENTS = {
    Operand.Q: "query",
    Operand.K: "key",
    Operand.V: "value",
    Operand.DO: "grad_out",
}
#: Operands of a linear layer that have a value for each token.
_OF_TOKENS = (Operand.X, Operand.G)
#: The result for tensors that only exist inside a fused kernel.
IN_KERNEL = Finding(Status.INCONCLUSIVE, "within the fused kernel, in high precision")


class ProductWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Judges the operands of every matrix product that runs inside `watching()`.

    Args:
        declared: the declaration of every slot; never what a module reports about itself.
        decoder: the decoder's layers, and an output layer of the map, by name; a product inside them must be listed.
        routers: modules inside them, by name, whose products must be in high precision under every scheme.
    """

    def __init__(
        self,
        declared: PrecisionMap,
        decoder: Mapping[str, nn.Module],
        routers: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observed = Observed(declared, {name: SlotCalls() for name in routers or {}})
        self._owners = Owners({**decoder, **(routers or {})})
        #: Whether operands in the working precision are compared with their sources, too.
        self._compares_all = any(
            entry.spec.fmt.family in BY_SOURCE
            for module in declared.values()
            for entry in module.entries()
        )

    def owner(self) -> str | None:
        """The module of the map, or the layer, whose forward or backward is running; None outside all of them."""
        return self._owners.current()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every product that is called inside."""
        with self._owners.watching(), watch_products(), self:
            yield

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(FUSED_ATTENTION):
            self._fused(func, args, kwargs or {})
        elif name in PAIRED or name in OTHER:
            self._product(name, args)
        elif name in LOOKUPS:
            self._lookup(args[0])
        return func(*args, **(kwargs or {}))

    def _product(self, name: str, args: tuple[Any, ...]) -> None:
        context = current_product()
        if context is UNTRACKED:
            return
        if isinstance(context, ProductContext) and name in PAIRED:
            left, right = (args[position] for position in PAIRED[name])
            self._in_context(context, left, right)
            return
        owner = self._owners.current()
        if owner in self.observed.routers and name in PAIRED:
            self._high(self.observed.routers[owner], [args[position] for position in PAIRED[name]])
        elif owner is not None:
            self.observed.undeclared[owner, f"aten.{name}"] += 1

    def _lookup(self, table: Tensor) -> None:
        """A tied embedding's table; rows of other tensors are looked up without a context."""
        context = current_product()
        if isinstance(context, ProductContext) and context.product is Product.LOOKUP:
            spec = self.observed.declared[context.module].spec(LOOKUP_W)
            assert context.sources is not None
            call = _Call(table.detach(), context.sources()[0], -1, 1, None, None)
            self._judge_operand(Entry(context.module, LOOKUP_W, spec), call, recomputed=False)

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The products of one fused attention call: its inputs are judged, tensors internal to the kernel cannot be."""
        context, name = current_product(), func.overloadpacket.__name__
        if not isinstance(context, FusedContext):
            owner = self._owners.current()
            if owner is not None:
                self.observed.undeclared[owner, f"aten.{name}"] += 1
            return
        tensors = {
            argument.name.removesuffix("_"): value
            for argument, value in zip(func._schema.arguments, args, strict=False)
        } | kwargs
        is_backward = name.endswith("_backward")
        recomputed = not is_backward and in_backward()
        for entry in self.observed.declared[context.module].entries():
            if is_backward == (entry.slot.product is Product.FPROP):
                continue
            source = _FUSED_ARGUMENTS.get(entry.slot.operand)
            if source is None:
                self.observed.note(entry, IN_KERNEL, recomputed)
            else:
                spec = entry.spec
                axis = -1 if spec.axis is Axis.HEAD_DIM else -2
                sources = context.sources
                before = sources()[entry.slot.operand] if sources and _needs_source(spec) else None
                amax = None if before is None else whole_amax(entry.module, before, spec, axis)
                finding = judge(tensors[source].detach(), spec, axis, before, amax)
                self.observed.note(entry, finding, recomputed)

    def _high(self, slot: SlotCalls, operands: list[Tensor]) -> None:
        """A product outside all schemes: neither operand may lie on a grid that its own dtype would not give."""
        slot.calls += 1
        for x in operands:
            finding = judge(x.detach(), _HIGH, -1)
            slot.quantised_calls += finding.quantised
            if finding not in slot.findings:
                slot.findings.append(finding)

    def _in_context(self, context: ProductContext, left: Tensor, right: Tensor) -> None:
        recomputed = context.recomputed or (context.product is Product.FPROP and in_backward())
        sources, part = context.sources, context.part
        empty = left.numel() == 0 or right.numel() == 0
        slots = operands_of(context.site, context.product)
        for side, (slot, x, dim) in enumerate(zip(slots, (left, right), (-1, -2), strict=True)):
            entry = Entry(context.module, slot, self.observed.declared[context.module].spec(slot))
            amax = part.amax(slot) if part else None
            needs_source = self._compares_all or _needs_source(entry.spec) or amax is not None
            source = sources()[side] if sources and needs_source else None
            if is_routed(entry.module.name) and empty:
                self.observed.slot(entry).empty_calls += 1
                continue
            x = x.detach() if context.widened_from is None else narrowed(x, context.widened_from)
            call = _Call(x, source, dim, context.sequences, part, amax)
            if slot.operand in _OF_TOKENS and differs_by_source(context.rows, entry.spec):
                assert context.rows is not None
                self._judge_sources(entry, call, context.rows, recomputed)
            else:
                self._judge_operand(entry, call, recomputed)

    def _judge_sources(self, entry: Entry, call: _Call, rows: Rows, recomputed: bool) -> None:
        """An expert's operand that is quantised by the source of its rows: one call, as bad as the worst source."""
        dim = call.reduced if entry.slot.product is Product.WGRAD else -2
        sequences = call.sequences // rows.num_sources if call.sequences > 1 else 1
        findings = []
        for source in range(rows.num_sources):
            tokens = rows.of_source(source, is_laid_out=call.sequences > 1)
            x = call.x.index_select(dim, tokens)
            before = None if call.source is None else call.source.index_select(dim, tokens)
            own = _Call(x, before, call.reduced, sequences, None, None)
            with as_source(rows, source):
                findings.append(_finding(entry, own))
        self.observed.note(entry, worst(findings), recomputed)

    def _judge_operand(self, entry: Entry, call: _Call, recomputed: bool) -> None:
        part = call.part
        if part is None:
            self.observed.note(entry, _finding(entry, call), recomputed)
            return
        x, source, axis = _in_blocks(entry, call)
        slot = self.observed.slot(entry)
        finding = judge(x, entry.spec, axis, source, call.amax)
        if part.index == 0:
            finding = CUT_SHORT if slot.parts.is_open else finding
            slot.parts = Parts()
        slot.parts.is_open = not part.last
        if call.amax is not None and source is not None:
            slot.parts.observe(own_amax(source, entry.spec, axis))
            if part.last:
                mismatch = slot.parts.mismatch(call.amax, partial(reduced, entry.module))
                if finding.status is not Status.MISMATCH:
                    finding = mismatch or finding
        self.observed.note(entry, finding, recomputed, part)


@dataclass(frozen=True)
class _Call:
    """One operand of one product call."""

    x: Tensor
    source: Tensor | None
    #: The dimension that the product reduces.
    reduced: int
    sequences: int
    part: Part | None
    #: The amax of the whole tensor that the part states.
    amax: Tensor | None


def _finding(entry: Entry, call: _Call) -> Finding:
    """The result for an operand of a whole product, under the amax of all ranks where its scale depends on it."""
    x, source, axis = _in_blocks(entry, call)
    amax = None if source is None else whole_amax(entry.module, source, entry.spec, axis)
    return judge(x, entry.spec, axis, source, amax)


def _in_blocks(entry: Entry, call: _Call) -> tuple[Tensor, Tensor | None, int]:
    """An operand and its source, and the dimension of their blocks."""
    x, axis = _along_blocks(entry, call.x, call.reduced, call.sequences)
    if call.source is None:
        return x, None, axis
    source, _ = _along_blocks(entry, call.source.detach(), call.reduced, call.sequences)
    return x, source, axis


def _needs_source(spec: QuantSpec) -> bool:
    """Whether an operand is judged with its source, whose amax may have to be reduced over ranks."""
    return needs_origin(spec) or is_reduced(spec)


def _along_blocks(entry: Entry, x: Tensor, reduced: int, sequences: int) -> tuple[Tensor, int]:
    """The operand and the dimension of its blocks: the reduced one, within one sequence.

    A reused forward copy has its blocks along the forward product's axis, which is the operand's other dimension.
    """
    if entry.spec.axis is not entry.slot.axis:
        return x, -1 if reduced == -2 else -2
    if sequences == 1:
        return x, reduced
    T = x.shape[reduced] // sequences
    if reduced == -2:
        return x.reshape(*x.shape[:-2], T, sequences, x.shape[-1]), -3
    return x.reshape(*x.shape[:-1], T, sequences), -2


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand in the working precision, if widening it from there was lossless; otherwise unchanged."""
    x = x.detach()
    narrow = x.to(dtype)
    return narrow if torch.equal(narrow.to(x.dtype), x) else x
