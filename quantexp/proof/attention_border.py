"""The border of attention: q, k, v and o, and in between the softmax that turns S into P.

The softmax is a module of its own in the plain and the tiled path. S, P, dP and dS are seen there, whole or tile by
tile, and P and dS must be the softmax of S and its derivative. Where no softmax module runs (fused attention), o and
the gradients of q, k and v are compared with attention in float64 on the expected operands (`fused_check`).

    # T queries, K keys, B sequences, H query heads, E head_dim of values, R rows of a tile
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantexp.formats.torch_internals import unseen
from quantexp.formats.types import Delta
from quantexp.proof.border import COMPLETE, Border, SequenceShares, Unit
from quantexp.proof.call import EXPONENTIALS, Call
from quantexp.proof.fused_check import fused_contrasts, fused_expected
from quantexp.proof.heads import OVER_QUERIES, TILES, Heads
from quantexp.proof.hooked import plain
from quantexp.proof.lines import Lines, no_elements
from quantexp.proof.products import Expected
from quantexp.proof.row_sums import delta, divided, keep_output, see_exponentials
from quantexp.proof.softmax import Tile, num_wrong_gradients, num_wrong_probabilities
from quantexp.proof.summed_heads import summed
from quantexp.quant.product_context import ProductContext
from quantexp.quant.sites import FPROP_P, FPROP_Q, Operand, Product, Site, Slot
from quantexp.schema import AttentionPath

#: What the tensors of the softmax must be.
_KINDS = {
    "P": "the softmax of its scores",
    "exp(S - m)": "those of its scores and m, or the sums of its rows",
    "dS": "the softmax's derivative",
}
#: The products that leave to the softmax, which kernels do not use.
_SCORES, _OF_P = _OF_TILES = ((Site.QK, Product.FPROP), (Site.PV, Product.DGRAD_P))


class AttentionBorder(Border):
    """The border of an attention module."""

    #: Of the call whose pass runs, or ran last; None if nothing of it is looked at.
    heads: Heads | None = None

    def __init__(
        self,
        *args: Any,
        softmax_scale: float,
        shares: SequenceShares,
        uses_kernels: Callable[[Tensor, Tensor], bool],
    ) -> None:
        """`uses_kernels` tells whether a call with these q and v computes o by kernels of quantexp's own.

        Those round S, P and dS otherwise than the tiles of torch, which run beside them in a complete check, and are
        compared with these there (`quantexp.quant.attention.kernels.agreement`).
        """
        super().__init__(*args)
        self.softmax_scale, self.shares, self.uses_kernels = softmax_scale, shares, uses_kernels
        module: Any = self.module
        #: P follows from S and the mask alone.
        window = module.scale_mask_softmax.window_size
        self._is_plain_softmax = module.softmax_offset is None and window is None
        slots = self.declared.slots.items()
        self.softmax = self.declared.spec(FPROP_P).softmax
        self.needs_softmax = not self.softmax.is_stock or any(
            s.operand in TILES and spec.quantised for s, spec in slots
        )

    def _install(self) -> None:
        module = self.module
        self._stand(self._enter, self._leave)
        softmax, dropout = module.scale_mask_softmax, module.attention_dropout
        assert isinstance(softmax, nn.Module)
        assert isinstance(dropout, nn.Module)
        self._hook(softmax.register_forward_pre_hook(plain(self._scores)))
        self._hook(softmax.register_forward_hook(plain(self._softmax)))
        self._hook(dropout.register_forward_hook(plain(self._dropout)))
        if self.softmax.unnormalised:
            assert isinstance(module.exponentials, nn.Module)
            self._hook(module.exponentials.register_forward_hook(plain(self._exponentials)))

    def _forget(self) -> None:
        super()._forget()
        self.heads = None

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        q, k, v, *others = args
        call = self._begin()
        self.heads = None
        if not (needed := self.needed(call)):
            return args, kwargs
        gather = self.shares.gather
        is_fused = getattr(module, "path", None) is AttentionPath.fused
        with unseen():
            for operand, x in (Operand.Q, q), (Operand.K, gather(k)), (Operand.V, gather(v)):
                call.see(operand, x.detach(), is_taken=operand not in needed and not is_fused)
        numbers, mask = (self.extent.left, self.extent.right), others[0] if others else None
        self.heads = Heads(
            call,
            self._run,
            partial(self.looks_at, call=call),
            numbers,
            mask,
            self.uses_kernels(q, v),
        )
        see = (
            ((Site.QK, Product.DGRAD_Q), self._query_gradient),
            ((Site.QK, Product.DGRAD_K), self._key_gradient),
            ((Site.PV, Product.DGRAD_V), self._value_gradient),
        )
        if torch.is_grad_enabled():
            views = []
            for x, (unit, on_gradient) in zip((q, k, v), see, strict=True):
                if x.requires_grad and self.looks_at(unit, call):
                    x = x.view_as(x)
                    self._on_gradient(x, self._of_call(on_gradient))
                views.append(x)
            if q.requires_grad:
                self.due |= {(Site.QK, Product.DGRAD_Q), (Site.QK, Product.DGRAD_K)}
            q, k, v = views
        return (q, k, v, *others), kwargs

    def _of_call(self, see: Callable[[Heads, Tensor], None]) -> Callable[[Tensor], None]:
        heads = self.heads
        assert heads is not None
        return lambda gradient: see(heads, gradient)

    def _looks_at_any(self, heads: Heads, first: Unit, second: Unit) -> bool:
        return self.looks_at(first, heads.call) or self.looks_at(second, heads.call)

    def _scores(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        S, *others = args
        heads = self.heads
        if heads is None:
            return args
        start = heads.start
        if self.looks_at(_SCORES, heads.call):
            with unseen():
                self._check_tile(heads, _SCORES, S.detach(), start, self.softmax_scale)
        heads.tile = Tile(start)
        if self._looks_at_any(heads, (Site.PV, Product.FPROP), (Site.QK, Product.DGRAD_Q)):
            with unseen():
                rows = heads.rows_of(S.detach(), start)
                hidden = heads.hidden_rows(S, self.shares.own, start)
                heads.tile = Tile(start, rows, hidden)
                if self.softmax.max_factor is not None:
                    heads.scores = S.detach(), others[0] if others else None
        if self._looks_at_any(heads, (Site.QK, Product.DGRAD_Q), (Site.QK, Product.DGRAD_K)):
            softmax: Any = module
            if S.requires_grad and not (softmax.input_in_float16 and softmax.softmax_in_fp32):
                # The stock softmax masks scores that it does not convert in place, and a view then loses its hooks.
                S = S.clone()
            tile = heads.tile
            self._on_gradient(
                S, self._of_call(lambda heads, dS: self._scores_gradient(heads, dS, tile))
            )
        return (S, *others)

    def _check_tile(
        self, heads: Heads, unit: Unit, x_BHRK: Tensor, start: int, scale: float = 1.0
    ) -> None:
        """Compare the drawn elements of a tile of S or dP."""
        rows, _ = heads.in_tile(start, x_BHRK.shape[2])
        keys = heads.keys_below(x_BHRK.shape[3])
        if len(rows) and len(keys):
            expected = heads.product(unit, rows, keys, scale * self._scale(*unit))
            self._report(heads, unit, heads.rows_of(x_BHRK, start)[:, keys], expected)

    def _softmax(self, module: nn.Module, args: object, P: Tensor) -> None:
        """P of a tile; what follows it is dropout, in the plain path."""
        heads = self.heads
        if heads is None:
            return
        start = heads.start
        if self.looks_at((Site.PV, Product.FPROP), heads.call) and self._is_plain_softmax:
            with unseen():
                rows = heads.rows_of(P.detach(), start)
                wrong = num_wrong_probabilities(rows, heads.tile)
                self._report_softmax(heads, "P", wrong, rows.numel())
        self._keep_probabilities(heads, P, start)
        heads.start = (start + P.shape[2]) % heads.num_queries
        heads.softmaxed = weakref.ref(P), P._version
        self._watch_probabilities(heads, P)

    def _exponentials(self, module: nn.Module, args: object, output: tuple[Tensor, Tensor]) -> None:
        """exp(S - m) of a tile, which the product with v has in place of P, and the row sums, which divide it."""
        heads, (E, sums) = self.heads, output
        if heads is None or not self.looks_at((Site.PV, Product.FPROP), heads.call):
            return
        with unseen():
            wrong, of = see_exponentials(heads, E, sums, self.softmax.max_factor)
            self._report_softmax(heads, "exp(S - m)", wrong, of)

    def _keep_probabilities(self, heads: Heads, P: Tensor, start: int) -> None:
        if self._looks_at_any(heads, (Site.PV, Product.FPROP), (Site.PV, Product.DGRAD_V)):
            with unseen():
                heads.keep(Operand.P, P.detach(), start)

    def _dropout(self, module: nn.Module, args: object, P: Tensor) -> None:
        heads = self.heads
        if heads is None:
            return
        before, version = heads.softmaxed
        if P is not before() or P._version != version:  # something is dropped
            self._keep_probabilities(heads, P, heads.tile.start)
            self._watch_probabilities(heads, P)

    def _watch_probabilities(self, heads: Heads, P: Tensor) -> None:
        """See the gradient of P, unless another tensor takes its place."""
        tile = heads.tile
        tile.num_watched += 1
        number = tile.num_watched

        def see(heads: Heads, dP: Tensor) -> None:
            if number == tile.num_watched:
                self._check_gradient(heads, dP, tile.start)
                tile.dP = heads.rows_of(dP, tile.start)

        if self._looks_at_any(heads, (Site.PV, Product.DGRAD_P), (Site.QK, Product.DGRAD_Q)):
            self._on_gradient(P, self._of_call(see))

    def _scores_gradient(self, heads: Heads, dS: Tensor, tile: Tile) -> None:
        heads.keep(Operand.DS, dS, tile.start)
        module: Any = self.module
        is_plain = self._is_plain_softmax and not module.attention_dropout.p
        kept = torch.float32 if module.scale_mask_softmax.softmax_in_fp32 else dS.dtype
        if is_plain and self.looks_at((Site.QK, Product.DGRAD_Q), heads.call):
            rows = heads.rows_of(dS, tile.start)
            if self.softmax.delta is Delta.O:
                tile.delta = delta(heads, tile.start, dS.shape[2])
            self._report_softmax(heads, "dS", num_wrong_gradients(rows, tile, kept), rows.numel())

    def _report_softmax(self, heads: Heads, name: str, wrong: int, of: int) -> None:
        words = f"{wrong} of {of} elements are not {_KINDS[name]}" if wrong else ""
        self.findings.other(heads.call, f"{heads.call.module} {name}", words)

    def _leave(self, module: nn.Module, args: object, o: Tensor) -> None:
        call, heads = self.call, self.heads
        # Of a call that is not looked at, too: its backward pass may follow the forward pass of another.
        self._on_gradient(o, lambda dO: self._output_gradient(call, heads, dO))
        if heads is None:
            return
        self.due.add((Site.PV, Product.FPROP))
        if self.softmax.delta is Delta.O and self.looks_at((Site.QK, Product.DGRAD_Q), heads.call):
            with unseen():
                keep_output(heads, o.detach())
        if self.looks_at((Site.PV, Product.FPROP), heads.call):
            with unseen():
                self._output(heads, heads.by_head(o.detach()))

    def _output(self, heads: Heads, o_TBHE: Tensor) -> None:
        unit = Site.PV, Product.FPROP
        if Operand.P not in heads.kept:
            self._report_fused(heads, unit, o_TBHE)
            return
        o = o_TBHE[:, heads.sequence, heads.heads[0]]
        seen = o[heads.queries][:, heads.value_dims]
        if self.softmax.unnormalised and EXPONENTIALS not in heads.kept:
            self.findings.product(heads.call, *unit, seen, None)
            return
        expected = heads.product(unit, heads.queries, heads.value_dims, self._scale(*unit))
        if self.softmax.unnormalised:
            expected = divided(heads, expected, seen.dtype)
        self._report(heads, unit, seen, expected)

    def _output_gradient(self, call: Call | None, heads: Heads | None, dO: Tensor) -> None:
        self.call, self.heads = call, heads
        if heads is None:
            return
        T, B, H, _ = heads.call.sources[Operand.Q].shape
        if self.needed(heads.call) & {Operand.DO, Operand.DS}:
            heads.call.see(Operand.DO, dO.reshape(T, B * H, -1).transpose(0, 1))
        heads.call.is_recomputed, heads.start = False, 0

    def _check_gradient(self, heads: Heads, dP_BHRK: Tensor, start: int) -> None:
        is_clipped = self.declared.spec(FPROP_P).clip_gradient
        is_due = self.looks_at(_OF_P, heads.call) and not is_clipped
        if is_due and Operand.DO in heads.call.sources:
            self._check_tile(heads, _OF_P, dP_BHRK, start)

    def _query_gradient(self, heads: Heads, dq: Tensor) -> None:
        unit, scale = (Site.QK, Product.DGRAD_Q), self.softmax_scale
        if Operand.DS in heads.kept:
            whole = scale * self._scale(*unit)
            product = heads.product(unit, heads.queries, heads.dims, whole)
            clipped = heads.clipped(FPROP_Q, heads.queries, heads.dims)
            seen = dq[:, heads.sequence, heads.heads[0]][heads.queries][:, heads.dims]
            self._report(
                heads, unit, seen, lambda: product().scaled_last(scale).zero_where(clipped)
            )
        elif Operand.DO in heads.call.sources:
            self._report_fused(heads, unit, dq)

    def _key_gradient(self, heads: Heads, dk: Tensor) -> None:
        unit = Site.QK, Product.DGRAD_K
        if Operand.DS in heads.kept:
            scale = self.softmax_scale * self._scale(*unit)
            self._report(heads, unit, *summed(heads, self.shares, dk, unit, heads.dims, scale))
        elif Operand.DO in heads.call.sources:
            self._report_fused(heads, unit, dk)

    def _value_gradient(self, heads: Heads, dv: Tensor) -> None:
        unit = Site.PV, Product.DGRAD_V
        if Operand.DO not in heads.call.sources:
            return
        if Operand.P in heads.kept:
            dims, scale = heads.value_dims, self._scale(*unit)
            self._report(heads, unit, *summed(heads, self.shares, dv, unit, dims, scale))
        else:
            self._report_fused(heads, unit, dv)

    def _report(self, heads: Heads, unit: Unit, seen: Tensor, expected: Expected) -> None:
        self._require_unchanged(heads.call, *unit)
        if heads.by_kernels and unit not in _OF_TILES:
            seen = seen[:0]
            expected = no_elements(seen)
        self.findings.product(heads.call, *unit, seen, expected)

    def _report_fused(self, heads: Heads, unit: Unit, x: Tensor) -> None:
        """Report o or a gradient, [T, B, heads, ..], of kernels, which show no softmax."""
        over_keys = unit[1] in OVER_QUERIES
        seen = x[:, heads.sequence, heads.group if over_keys else heads.heads[0]]
        expected: Expected | None = None
        if heads.by_kernels:
            seen = seen[:0]
            expected = no_elements(seen)
        elif not self.needs_softmax:  # P and dS are as the kernel has them
            seen, expected = fused_expected(heads, unit[1], seen, self.softmax_scale)
            if most := self.extent.probabilities:
                is_each, scale = self.extent is COMPLETE, self.softmax_scale
                contrasts = fused_contrasts(heads, unit[1], x, scale, most, is_each=is_each)
                self.findings.contrasts(heads.call, *unit, contrasts)
        self._require_unchanged(heads.call, *unit)
        self.findings.product(heads.call, *unit, seen, expected)

    def drawn_operands(
        self, context: ProductContext, left: Tensor, right: Tensor
    ) -> Iterator[tuple[Slot, Tensor, Lines]]:
        """See `Border`."""
        if self.heads is not None and self.looks_at((context.site, context.product), self.call):
            yield from self.heads.drawn_operands(context, left, right)
