"""The forward and the backward of attention in tiles of queries, by torch.

    # T tokens (queries or keys), B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    # N = B*H; K keys of a tile; R rows, the queries of a tile

What is read (R) and written (W) of T x T, beside the softmax and its own backward; in brackets where both products
multiply one copy of dS, as in formats without blocks:

                quantise                      multiply
    forward     P: R W                        W S, R P
    backward    P: R W, dS: R 2 W [R W]       W S, R P, W dP, 2 R dS

and a read more of each that is scaled by its own amax. Where dS's two slots have different formats or options or depend
on the moment (stochastic rounding, delayed scales, a transform) it is read for each.

What the plain path hands to a tap (P and its gradient, dS) is put together when it is asked for, and then held whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quantexp.quant.attention.fused import Asked
from quantexp.quant.attention.plain import by_sequence_layout, by_token, summed_over_group
from quantexp.quant.attention.tile_products import (
    DS_BY_KEYS,
    DS_BY_QUERIES,
    P_BACKWARD,
    P_FORWARD,
    TileProducts,
    dim_of,
)
from quantexp.quant.attention.tiles import Tile
from quantexp.quant.hooks import BACKWARD, FORWARD, POST, PRE, Tap, tell_operand, wants_operand
from quantexp.quant.operand import clipped, follows_own_amax
from quantexp.quant.sites import Product, Site


class _Gathered:
    """Tensors of T x T put together from tiles, of those that somebody looks at."""

    def __init__(self, work: TileProducts, names: Iterable[object]) -> None:
        self._shape = (work.B * work.H, work.T, work.T)
        self._found: dict[object, Tensor | None] = dict.fromkeys(names)

    def __bool__(self) -> bool:
        return bool(self._found)

    def put(self, name: object, tile: Tile, x_NRK: Tensor) -> None:
        """Keep a tile, if anybody looks."""
        if name not in self._found:
            return
        whole = self._found[name]
        if whole is None:
            whole = self._found[name] = x_NRK.new_empty(self._shape)
        whole[:, tile.rows] = x_NRK

    def take(self, name: object) -> Tensor:
        """The whole, [N, T, T]."""
        whole = self._found[name]
        assert whole is not None
        return whole


class Forward:
    """The forward of one micro-batch."""

    def __init__(self, work: TileProducts, tap: Tap, asked: Asked) -> None:
        self.work, self.tap = work, tap
        self.is_told = wants_operand(work.precision, *P_FORWARD)
        self.is_asked = asked(FORWARD, "attn_weights")

    @property
    def is_looked_at(self) -> bool:
        """Whether anybody looks at P."""
        return self.is_told or self.is_asked

    def output(self) -> Tensor:
        """The output o, [N, T, E]; what is looked at is handed over."""
        work = self.work
        q = work.whole((Site.QK, Product.FPROP, "q"))
        k = work.whole((Site.QK, Product.FPROP, "k"))
        v = work.whole((Site.PV, Product.FPROP, "v"))
        names = ["P"] if self.is_looked_at else []
        gathered = _Gathered(work, [*names, *((P_FORWARD,) if self.is_told else ())])
        spans = work.tiles(whole_rows=bool(gathered))
        if follows_own_amax(work.operand(P_FORWARD)):
            for tile in spans:
                P = work.softmax(work.scores(tile, q, k, again=True), tile)
                work.see(P_FORWARD, P)
        o = v.new_empty(v.shape)
        for tile in spans:
            P = work.softmax(work.scores(tile, q, k), tile)
            P_held = work.within(P_FORWARD, tile, P)
            gathered.put("P", tile, P)
            gathered.put(P_FORWARD, tile, P_held)
            o[:, tile.rows] = work.product(Site.PV, Product.FPROP, tile, P_held, v[:, tile.keys], P)
        self._hand_over(gathered)
        return o

    def _hand_over(self, gathered: _Gathered) -> None:
        work, by_sequence = self.work, by_sequence_layout(self.work.B)
        if self.is_told:
            whole = (gathered.take("P"), gathered.take(P_FORWARD))
            tell_operand(work.precision, *P_FORWARD, *whole, by_sequence)
        if self.is_asked:
            self.tap(FORWARD, POST, "attn_weights", by_sequence(gathered.take("P")))


class Backward:
    """The backward of one micro-batch."""

    def __init__(self, work: TileProducts, tap: Tap, asked: Asked) -> None:
        self.work, self.tap = work, tap
        self.asked = [
            name for name in ("grad_scores", "grad_attn_weights") if asked(BACKWARD, name)
        ]
        slots = (P_BACKWARD, DS_BY_KEYS, DS_BY_QUERIES)
        self.told = [slot for slot in slots if wants_operand(work.precision, *slot)]
        names = {"grad_scores": "dS", "grad_attn_weights": "dP"}
        kept = {slot[2] for slot in self.told} | {names[name] for name in self.asked}
        self.gathered = _Gathered(work, [*kept, *self.told])

    @property
    def is_looked_at(self) -> bool:
        """Whether anybody looks at P, dP or dS."""
        return bool(self.gathered)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """What q, k and v have of gradients in every query head, [N, T, D or E], dq and dk before the softmax scale."""
        work = self.work
        # for P once more, and for the products of the backward
        self.q = work.whole((Site.QK, Product.FPROP, "q"))
        self.k = work.whole((Site.QK, Product.FPROP, "k"))
        self.dO_p = work.whole((Site.PV, Product.DGRAD_P, "dO"))
        self.v_p = work.whole((Site.PV, Product.DGRAD_P, "v"))
        self.dO_v = work.whole((Site.PV, Product.DGRAD_V, "dO"))
        self.k_q = work.whole((Site.QK, Product.DGRAD_Q, "k"))
        self.q_k = work.whole((Site.QK, Product.DGRAD_K, "q"))
        spans = work.tiles(whole_rows=bool(self.gathered))
        self._see_all(spans)
        dq = self.q.new_empty(self.q.shape)
        dk = self.k.new_zeros(self.k.shape, dtype=torch.float32)
        dv = self.v_p.new_zeros(self.v_p.shape, dtype=torch.float32)
        for tile in spans:
            self._add(tile, dq, dk, dv)
        return dq, dk.to(work.dtype), dv.to(work.dtype)

    def _add(self, tile: Tile, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """What a tile has part in of the gradients; nothing of it is left afterwards."""
        work = self.work
        P, dP, dS = self._tile(tile)
        P_held = work.within(P_BACKWARD, tile, P)
        dv[:, tile.keys] += work.product(*P_BACKWARD[:2], tile, P_held, self.dO_v[:, tile.rows], P)
        self._keep(tile, {"P": P, "dP": dP, P_BACKWARD: P_held})
        del P, dP, P_held
        dS_q, dS_k = work.within_both(DS_BY_KEYS, DS_BY_QUERIES, tile, dS)
        self._keep(tile, {"dS": dS, DS_BY_KEYS: dS_q, DS_BY_QUERIES: dS_k})
        dq[:, tile.rows] = work.product(*DS_BY_KEYS[:2], tile, dS_q, self.k_q[:, tile.keys], dS)
        del dS_q
        dk[:, tile.keys] += work.product(*DS_BY_QUERIES[:2], tile, dS_k, self.q_k[:, tile.rows], dS)

    def _keep(self, tile: Tile, found: dict[object, Tensor]) -> None:
        for name, x in found.items():
            self.gathered.put(name, tile, x)

    def _tile(self, tile: Tile, *, again: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """P, dP and dS of a tile, each [N, R, K]; dS by the softmax's own backward."""
        work = self.work
        S = work.scores(tile, self.q, self.k, again=again).requires_grad_()
        with torch.enable_grad():
            P = work.softmax(S, tile)
        dP = work.product(
            Site.PV,
            Product.DGRAD_P,
            tile,
            self.dO_p[:, tile.rows],
            self.v_p[:, tile.keys],
            again=again,
        )
        operand, amax = work.operand(P_FORWARD), work.amaxes.get(P_FORWARD)
        dP = clipped(dP, P.detach(), operand, dim_of("P", operand), amax)
        (dS,) = torch.autograd.grad(P, S, dP)
        return P.detach(), dP, dS

    def _see_all(self, spans: list[Tile]) -> None:
        """The amaxes that scales of P and dS follow from, over all tiles."""
        work = self.work
        of_forward = work.amaxes.get(P_FORWARD)
        work.amaxes = {} if of_forward is None else {P_FORWARD: of_forward}
        if of_forward is not None and work.operand(P_BACKWARD).reuse:
            work.amaxes[P_BACKWARD] = of_forward
        slots = [
            slot
            for slot in (P_BACKWARD, DS_BY_KEYS, DS_BY_QUERIES)
            if follows_own_amax(work.operand(slot)) and slot not in work.amaxes
        ]
        is_one = DS_BY_QUERIES in slots and work.shares_read(DS_BY_KEYS, DS_BY_QUERIES)
        if is_one:
            slots.remove(DS_BY_QUERIES)
        for tile in spans if slots else ():
            P, _, dS = self._tile(tile, again=True)
            for slot in slots:
                work.see(slot, P if slot is P_BACKWARD else dS)
        if is_one:
            work.amaxes[DS_BY_QUERIES] = work.amaxes[DS_BY_KEYS]

    def ended(
        self, dq_NTD: Tensor, dk_NTD: Tensor, dv_NTE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients as q, k and v lie, clipped where declared, and told with all else that is looked at."""
        work, by_sequence = self.work, by_sequence_layout(self.work.B)
        q_TBHD, k_TBGD, v_TBGE = (work.tensors[name] for name in "qkv")
        groups = k_TBGD.shape[2]
        dq = by_token(dq_NTD * work.softmax_scale, work.B)
        dk = summed_over_group(dk_NTD * work.softmax_scale, work.B, groups)
        dv = summed_over_group(dv_NTE, work.B, groups)
        dq = clipped(dq, q_TBHD, work.operand((Site.QK, Product.FPROP, "q")), -1)
        dk = clipped(dk, k_TBGD, work.operand((Site.QK, Product.FPROP, "k")), -1)
        dv = clipped(dv, v_TBGE, work.operand((Site.PV, Product.FPROP, "v")), 0)
        for slot in self.told:
            whole = (self.gathered.take(slot[2]), self.gathered.take(slot))
            tell_operand(work.precision, *slot, *whole, by_sequence)
        self.tap(BACKWARD, PRE, "grad_output", by_token(work.tensors["dO"], work.B))
        if "grad_scores" in self.asked:
            self.tap(BACKWARD, PRE, "grad_scores", by_sequence(self.gathered.take("dS")))
        if "grad_attn_weights" in self.asked:
            self.tap(BACKWARD, POST, "grad_attn_weights", by_sequence(self.gathered.take("dP")))
        for name, x in (("query", dq), ("key", dk), ("value", dv)):
            self.tap(BACKWARD, POST, f"grad_{name}", x)
        return dq, dk, dv
