"""Watches the modules of the precision map: completely in some iterations, in drawn parts in every other one.

    operands    what reaches a product must be the image of its source, bit for bit
    products    what leaves a module must be the product of the expected operands (`border`, `attention_border`)

A complete watch sees every call of a matrix product below autograd, by a `TorchDispatchMode`. The context that our
product functions set says which slots the operands are compared with; sources come from the borders alone. A product
that a decoder layer calls without a context fails the run. A drawn watch needs no dispatch mode: the product functions
show it their operands, and the borders see what becomes of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quantexp.formats.torch_internals import in_backward
from quantexp.model.decoder import is_routed
from quantexp.proof.border import Border
from quantexp.proof.call import Call
from quantexp.proof.comparing import (
    TILES,
    TRANSPOSED_TILES,
    attention_finding,
    narrowed,
    sum_finding,
    tile_finding,
    whole_finding,
)
from quantexp.proof.expected import Images, own_amax_of
from quantexp.proof.findings import Finding, Status
from quantexp.proof.hooked import Hooked
from quantexp.proof.objective import NOT_KNOWN, Objective
from quantexp.proof.owners import Owners
from quantexp.proof.products import project
from quantexp.proof.router_border import RouterBorder
from quantexp.proof.verdict import (
    CUT_SHORT,
    Observed,
    Parts,
    other_shape,
)
from quantexp.quant.precision import Entry, ModuleId
from quantexp.quant.product_context import (
    UNTRACKED,
    FusedContext,
    Part,
    ProductContext,
    current_product,
    watch_products,
)
from quantexp.quant.sites import LOOKUP_W, Operand, Product, Site, operands_of

#: Operators that multiply two matrices (or stacks of them), with the positions of left and right operand.
PAIRED = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2)}
#: Operators that multiply in another way; our products never call them.
OTHER = frozenset(
    {
        *("mv", "addmv", "dot", "vdot", "addr", "linear", "matmul", "einsum"),
        *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm", "_addmm_activation"),
        *("_sparse_mm", "_sparse_addmm", "sspaddmm", "convolution", "_convolution"),
        *(
            "_trilinear",
            "_cdist_forward",
            "_euclidean_dist",
            "mkldnn_linear",
            "_weight_int8pack_mm",
        ),
    }
)
FUSED_ATTENTION = "_scaled_dot_product"
#: Operators that look up rows of their first argument.
LOOKUPS = ("embedding", "index", "index_select")

#: The arguments of a fused call that are operands; P and dS are internal to the kernel.
_FUSED_ARGUMENTS = {
    Operand.Q: "query",
    Operand.K: "key",
    Operand.V: "value",
    Operand.DO: "grad_out",
}
#: The result for tensors that only exist inside a fused kernel.
IN_KERNEL = Finding(Status.INCONCLUSIVE, "within the fused kernel, in high precision")


class ProductWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compares every matrix product that runs inside `watching()`, completely.

    Args:
        observed: receives the results.
        borders: those of the modules of the map, but for modules whose products no operator of torch computes.
        decoder: the decoder's layers, and an output layer of the map, by name; a product inside them must be listed.
        routers: modules inside them, by name, whose products must be in high precision under every scheme.
        tables: for each embedding of the map, what begins a call of it; its parameter is the operand w.
        layers: what compares the insides of the decoder's layers.
        objective: what the passes learn.
    """

    def __init__(
        self,
        observed: Observed,
        borders: Mapping[ModuleId, Border],
        decoder: Mapping[str, nn.Module],
        routers: Mapping[str, nn.Module] | None = None,
        tables: Mapping[ModuleId, Callable[[], Call]] | None = None,
        layers: Sequence[Hooked] = (),
        objective: Objective = NOT_KNOWN,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observed = observed
        self._layers = layers
        self._borders, self._tables = borders, tables or {}
        self._owners = Owners({**decoder, **(routers or {})})
        self._routers = {
            name: RouterBorder(module, partial(self._wrong_router, name), objective)
            for name, module in (routers or {}).items()
        }

    def owner(self) -> str | None:
        """The module of the map, or the layer, whose forward or backward is running; None outside all of them."""
        return self._owners.current()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every product that is called inside."""
        with contextlib.ExitStack() as stack:
            for border in self._borders.values():
                stack.enter_context(border)
            for router in self._routers.values():
                stack.enter_context(router.watching())
            for layer in self._layers:
                stack.enter_context(layer)
            for context in (self._owners.watching(), watch_products(), self):
                stack.enter_context(context)
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
            self._product(name, args, kwargs or {})
        elif name in LOOKUPS:
            self._lookup(args[0])
        return func(*args, **(kwargs or {}))

    def _product(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        context = current_product()
        if context is UNTRACKED:
            return
        if isinstance(context, ProductContext) and name in PAIRED:
            left, right = (args[position] for position in PAIRED[name])
            self._in_context(context, left.detach(), right.detach(), kwargs.get("alpha", 1))
            return
        owner = self._owners.current()
        if owner in self.observed.routers and name in PAIRED:
            self._high(owner, [args[position].detach() for position in PAIRED[name]])
        elif owner is not None:
            self.observed.undeclared[owner, f"aten.{name}"] += 1

    def _lookup(self, table: Tensor) -> None:
        """A tied embedding's table; rows of other tensors are looked up without a context."""
        context = current_product()
        if isinstance(context, ProductContext) and context.product is Product.LOOKUP:
            call = self._tables[context.module]()
            entry = Entry(context.module, LOOKUP_W, call.spec(LOOKUP_W))
            source, explain = call.sources[Operand.W], self.observed.explain
            finding = whole_finding(call, entry, table.detach(), source, explain)
            self.observed.note(entry, finding, recomputed=False)

    def _call(self, module: ModuleId) -> Call | None:
        border = self._borders.get(module)
        return None if border is None else border.call

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The products of a fused attention call: its inputs are compared, tensors internal to the kernel cannot be."""
        context, name = current_product(), func.overloadpacket.__name__
        if context is UNTRACKED:
            return
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
        call = self._call(context.module)
        for entry in self.observed.declared[context.module].entries():
            slot = entry.slot
            if is_backward == (slot.product is Product.FPROP):
                continue
            argument = _FUSED_ARGUMENTS.get(slot.operand)
            if argument is None:
                self.observed.note(entry, IN_KERNEL, recomputed)
            elif call is None or slot.operand not in call.sources:
                self.observed.note(entry, OUTSIDE, recomputed)
            else:
                own = tensors[argument].detach()
                matrix = own.flatten(0, 1)[..., : call.sources[slot.operand].shape[-1]]
                finding = attention_finding(
                    call, entry, matrix, self.observed.explain, is_stack=True
                )
                self.observed.note(entry, finding, recomputed)

    def _high(self, router: str, operands: list[Tensor]) -> None:
        """A router's product, outside all schemes: each operand must be what entered the router, its weight or g."""
        slot = self.observed.routers[router]
        slot.calls += 1
        for x in operands:
            is_source = self._routers[router].has(x)
            slot.quantised_calls += not is_source
            slot.add(Finding(Status.ENGAGED) if is_source else ALTERED)

    def _wrong_router(self, router: str, words: str) -> None:
        self.observed.routers[router].add(Finding(Status.MISMATCH, words, quantised=True))

    def _in_context(
        self, context: ProductContext, left: Tensor, right: Tensor, alpha: float
    ) -> None:
        recomputed = context.recomputed or (context.product is Product.FPROP and in_backward())
        call = self._call(context.module)
        slots = operands_of(context.site, context.product)
        empty = left.numel() == 0 or right.numel() == 0
        if call is not None and context.source is not None and call.rows is not None:
            call = call.of_source(context.source)
        wrong = False
        for slot, x in zip(slots, (left, right), strict=True):
            entry = Entry(context.module, slot, self.observed.declared[context.module].spec(slot))
            if is_routed(entry.module.name) and empty:
                self.observed.slot(entry).empty_calls += 1
                continue
            if context.widened_from is not None:
                x = narrowed(x, context.widened_from)
            finding = self._operand(call, entry, x, context.part)
            self.observed.note(entry, finding, recomputed, context.part)
            wrong |= finding.status is Status.MISMATCH
        if context.site is Site.LINEAR and call is not None and not empty and not wrong:
            seed = call.moment.choice(context.module, context.product, "signs").getrandbits(32)
            if context.source is None:
                call.projections[context.product] = project(left, right, alpha, seed)

    def _operand(self, call: Call | None, entry: Entry, x: Tensor, part: Part | None) -> Finding:
        slot = entry.slot
        if call is None or call.key(slot) not in call.sources:
            return OUTSIDE
        if not call.is_unchanged(call.key(slot)):
            return CHANGED
        if part is not None:
            return self._tile(call, entry, x, part)
        if slot.site is Site.LINEAR:
            source = Images(call).source(slot)
            is_turned = (slot.operand, slot.product) in (
                (Operand.W, Product.FPROP),
                (Operand.G, Product.WGRAD),
            )
            own = x.t() if is_turned else x
            if Images(call).is_summed(slot):
                return sum_finding(call, entry, own, self.observed.explain)
            if own.numel() != source.numel():
                return other_shape(own, source)
            return whole_finding(
                call, entry, own.reshape(source.shape), source, self.observed.explain
            )
        return attention_finding(call, entry, x, self.observed.explain)

    def _tile(self, call: Call, entry: Entry, x: Tensor, part: Part) -> Finding:
        """An operand of one tile; P and dS have the amax that the product states, until the last tile is seen."""
        slot = entry.slot
        state = self.observed.slot(entry)
        if slot.operand in TILES:
            source = call.sources[call.key(slot)]
            own = x.transpose(1, 2) if slot.product in TRANSPOSED_TILES else x
            if own.shape != source.shape:
                finding = other_shape(own, source)
            else:
                finding = tile_finding(call, entry, own, source, part, self.observed.explain)
        else:
            finding = attention_finding(call, entry, x, self.observed.explain, part)
        if part.index == 0:
            finding = CUT_SHORT if state.parts.is_open else finding
            state.parts = Parts()
        state.parts.is_open = not part.last
        stated = part.amax(slot)
        if stated is not None and slot.operand in TILES:
            state.parts.observe(own_amax_of(call, slot, call.sources[call.key(slot)]))
            if part.last:
                mismatch = state.parts.mismatch(stated, partial(call.largest, entry.module))
                if finding.status is not Status.MISMATCH:
                    finding = mismatch or finding
        return finding


#: The result for an operand of a router that it has not been given.
ALTERED = Finding(Status.MISMATCH, "an operand is not what entered it", quantised=True)
#: The result for an operand whose source has other values than when it entered the module.
CHANGED = Finding(Status.MISMATCH, "its source was changed within the module", quantised=True)
#: The result for a product that runs while no pass of its module does.
OUTSIDE = Finding(
    Status.MISMATCH, "its product ran outside of a pass of its module", quantised=True
)
