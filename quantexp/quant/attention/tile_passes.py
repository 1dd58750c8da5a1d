"""Forward and backward passes of attention in tiles of queries, in torch.

    # T tokens (queries or keys), B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    # N = B*H; K keys of a tile; R rows, the queries of a tile

T x T elements read (R) and written (W), besides the softmax and its own backward pass. In brackets: the traffic where
both products share one copy of dS, as in formats without blocks.

                quantise                      multiply
    forward     P: R W                        W S, R P
    backward    P: R W, dS: R 2 W [R W]       W S, R P, W dP, 2 R dS

Each tensor scaled by its own amax is read once more. dS is read twice if its two slots have different formats or
options or need the step state (stochastic rounding, delayed scales, a transform).

If a hook needs P, the gradient of P, or dS, the tiles are assembled and the tensor is stored whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quantexp.quant.attention.plain import by_sequence_layout, by_token, summed_over_group
from quantexp.quant.attention.row_sums import OutputSums, divided
from quantexp.quant.attention.tile_products import TileProducts
from quantexp.quant.attention.tiles import Tile
from quantexp.quant.hooks import (
    BACKWARD,
    FORWARD,
    POST,
    PRE,
    call_operand_hooks,
    is_operand_hooked,
)
from quantexp.quant.multiply import clipped_gradient
from quantexp.quant.sites import (
    DGRAD_K_DS,
    DGRAD_K_Q,
    DGRAD_P_DO,
    DGRAD_P_V,
    DGRAD_Q_DS,
    DGRAD_Q_K,
    DGRAD_V_DO,
    DGRAD_V_P,
    FPROP_K,
    FPROP_P,
    FPROP_Q,
    FPROP_V,
    Operand,
    Product,
    Site,
)
from quantexp.quant.whole_amax import follows_own_amax

#: What of P enters the product with v, in `_Gathered`.
_MULTIPLIED = "multiplied"


class _Gathered:
    """T x T tensors assembled from tiles, for those that a hook needs."""

    def __init__(self, work: TileProducts, names: Iterable[object]) -> None:
        self._shape = (work.B * work.H, work.T, work.num_keys)
        self._tensors: dict[object, Tensor | None] = dict.fromkeys(names)

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def put(self, name: object, tile: Tile, x_NRK: Tensor) -> None:
        """Store a tile, if a hook needs its tensor."""
        if name not in self._tensors:
            return
        whole = self._tensors[name]
        if whole is None:
            whole = self._tensors[name] = x_NRK.new_empty(self._shape)
        whole[:, tile.rows] = x_NRK

    def take(self, name: object) -> Tensor:
        """The whole tensor, [N, T, T]."""
        whole = self._tensors[name]
        assert whole is not None
        return whole


class Forward:
    """The forward pass of one micro-batch."""

    def __init__(self, work: TileProducts) -> None:
        self.work, self.hook = work, work.call.hook
        self.is_hooked = is_operand_hooked(work.precision, FPROP_P)
        names: dict[str, object] = {"attn_weights": Operand.P}
        if work.spec(FPROP_P).softmax.unnormalised:
            names["exp_scores"] = _MULTIPLIED
        self.wanted = {name: of for name, of in names.items() if work.call.wants(FORWARD, name)}

    @property
    def is_observed(self) -> bool:
        """Whether a hook needs P, or what of it is multiplied."""
        return self.is_hooked or bool(self.wanted)

    def output(self) -> Tensor:
        """The output o, [N, T, E]; calls the hooks."""
        work = self.work
        q = work.whole(FPROP_Q)
        k = work.whole(FPROP_K)
        v = work.whole(FPROP_V)
        names: list[object] = [*self.wanted.values()]
        gathered = _Gathered(work, [*names, *((_MULTIPLIED, FPROP_P) if self.is_hooked else ())])
        spans = work.tiles(whole_rows=bool(gathered))
        if follows_own_amax(work.spec(FPROP_P)):
            for tile in spans:
                _, P, _ = work.multiplied(work.scores(tile, q, k, recomputed=True), tile)
                work.observe(FPROP_P, P)
            work.reduce_amax(FPROP_P)
        o = v.new_empty(v.shape[0], work.T, v.shape[2])
        for tile in spans:
            P, source, sums = work.multiplied(work.scores(tile, q, k), tile)
            P_quantised = work.quantised_tile(FPROP_P, tile, source)
            gathered.put(Operand.P, tile, P)
            gathered.put(_MULTIPLIED, tile, source)
            gathered.put(FPROP_P, tile, P_quantised)
            product = work.product(Site.PV, Product.FPROP, tile, P_quantised, v[:, tile.keys])
            o[:, tile.rows] = product if sums is None else divided(product, sums)
        self._hand_over(gathered)
        return o

    def _hand_over(self, gathered: _Gathered) -> None:
        work, by_sequence = self.work, by_sequence_layout(self.work.B)
        if self.is_hooked:
            whole = (gathered.take(_MULTIPLIED), gathered.take(FPROP_P))
            call_operand_hooks(work.precision, FPROP_P, *whole, by_sequence)
        for name, of in self.wanted.items():
            self.hook(FORWARD, POST, name, by_sequence(gathered.take(of)))


class Backward:
    """The backward pass of one micro-batch."""

    def __init__(self, work: TileProducts, o_NTE: Tensor | None = None) -> None:
        """`o_NTE` is the forward pass's under `delta: o`."""
        self.work, self.hook, self.o = work, work.call.hook, o_NTE
        self.wanted = [
            name for name in ("grad_scores", "grad_attn_weights") if work.call.wants(BACKWARD, name)
        ]
        slots = (DGRAD_V_P, DGRAD_Q_DS, DGRAD_K_DS)
        self.hooked_slots = [slot for slot in slots if is_operand_hooked(work.precision, slot)]
        names: dict[str, object] = {"grad_scores": Operand.DS, "grad_attn_weights": "dP"}
        kept = {slot.operand for slot in self.hooked_slots} | {names[name] for name in self.wanted}
        self.gathered = _Gathered(work, [*kept, *self.hooked_slots])

    @property
    def is_observed(self) -> bool:
        """Whether a hook needs P, dP or dS."""
        return bool(self.gathered)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v in every query head, [N, T, D or E]; dq and dk before the softmax scale.

        dk and dv are float32 if they are parts of a sum over ranks.
        """
        work = self.work
        # q and k recompute P; the rest are the operands of the backward products
        self.q = work.whole(FPROP_Q)
        self.k = work.whole(FPROP_K)
        self.dO_p = work.whole(DGRAD_P_DO)
        self.v_p = work.whole(DGRAD_P_V)
        self.dO_v = work.whole(DGRAD_V_DO)
        self.k_q = work.whole(DGRAD_Q_K)
        self.q_k = work.whole(DGRAD_K_Q)
        spans = work.tiles(whole_rows=bool(self.gathered))
        self._observe_all(spans)
        dq = self.q.new_empty(self.q.shape)
        dk = self.k.new_zeros(self.k.shape, dtype=torch.float32)
        dv = self.v_p.new_zeros(self.v_p.shape, dtype=torch.float32)
        for tile in spans:
            self._add(tile, dq, dk, dv)
        if work.call.share is not None:
            return dq, dk, dv
        return dq, dk.to(work.dtype), dv.to(work.dtype)

    def _add(self, tile: Tile, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Adds one tile's contribution to the gradients and releases the tile."""
        work = self.work
        P, dP, dS = self._tile(tile)
        P_quantised = work.quantised_tile(DGRAD_V_P, tile, P)
        dv[:, tile.keys] += work.product(*DGRAD_V_P[:2], tile, P_quantised, self.dO_v[:, tile.rows])
        self._keep(tile, {Operand.P: P, "dP": dP, DGRAD_V_P: P_quantised})
        del P, dP, P_quantised
        dS_q, dS_k = work.quantised_tile_pair(DGRAD_Q_DS, DGRAD_K_DS, tile, dS)
        self._keep(tile, {Operand.DS: dS, DGRAD_Q_DS: dS_q, DGRAD_K_DS: dS_k})
        dq[:, tile.rows] = work.product(*DGRAD_Q_DS[:2], tile, dS_q, self.k_q[:, tile.keys])
        del dS_q
        dk[:, tile.keys] += work.product(*DGRAD_K_DS[:2], tile, dS_k, self.q_k[:, tile.rows])

    def _keep(self, tile: Tile, tensors: dict[object, Tensor]) -> None:
        for name, x in tensors.items():
            self.gathered.put(name, tile, x)

    def _tile(self, tile: Tile, *, recomputed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """P, dP and dS of a tile, each [N, R, K]; dS by the softmax's own backward."""
        work = self.work
        S = work.scores(tile, self.q, self.k, recomputed=recomputed).requires_grad_()
        delta = None
        if self.o is not None:
            delta = OutputSums()
            delta.see(work.tensors[Operand.DO][:, tile.rows], self.o[:, tile.rows])
        with torch.enable_grad():
            P = work.softmax(S, tile, delta)
        dP = work.product(
            Site.PV,
            Product.DGRAD_P,
            tile,
            self.dO_p[:, tile.rows],
            self.v_p[:, tile.keys],
            recomputed=recomputed,
        )
        amax = work.amaxes.get(FPROP_P)
        dP = clipped_gradient(work.precision, FPROP_P, dP, P.detach(), amax)
        (dS,) = torch.autograd.grad(P, S, dP)
        return P.detach(), dP, dS

    def _observe_all(self, spans: list[Tile]) -> None:
        """Computes the amaxes that determine scales of P and dS, over all tiles."""
        work = self.work
        forward_amax = work.amaxes.get(FPROP_P)
        work.amaxes = {} if forward_amax is None else {FPROP_P: forward_amax}
        if forward_amax is not None and work.spec(DGRAD_V_P).reuse:
            work.amaxes[DGRAD_V_P] = forward_amax
        slots = [
            slot
            for slot in (DGRAD_V_P, DGRAD_Q_DS, DGRAD_K_DS)
            if follows_own_amax(work.spec(slot)) and slot not in work.amaxes
        ]
        is_one = DGRAD_K_DS in slots and work.shares_read(DGRAD_Q_DS, DGRAD_K_DS)
        if is_one:
            slots.remove(DGRAD_K_DS)
        for tile in spans if slots else ():
            P, _, dS = self._tile(tile, recomputed=True)
            for slot in slots:
                work.observe(slot, P if slot is DGRAD_V_P else dS)
        for slot in slots:
            work.reduce_amax(slot)
        if is_one:
            work.amaxes[DGRAD_K_DS] = work.amaxes[DGRAD_Q_DS]

    def finish(
        self, dq_NTD: Tensor, dk_NTD: Tensor, dv_NTE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients in the layout of q, k and v, clipped where declared; calls the hooks."""
        work, by_sequence = self.work, by_sequence_layout(self.work.B)
        q_TBHD, k_TBGD, v_TBGE = (
            work.tensors[operand] for operand in (Operand.Q, Operand.K, Operand.V)
        )
        groups = k_TBGD.shape[2]
        dq = by_token(dq_NTD * work.call.softmax_scale, work.B)
        dk = summed_over_group(dk_NTD * work.call.softmax_scale, work.B, groups)
        dv = summed_over_group(dv_NTE, work.B, groups)
        dq = clipped_gradient(work.precision, FPROP_Q, dq, q_TBHD)
        dk = clipped_gradient(work.precision, FPROP_K, dk, k_TBGD)
        dv = clipped_gradient(work.precision, FPROP_V, dv, v_TBGE)
        dk, dv = work.call.own_keys(dk, k_TBGD), work.call.own_keys(dv, v_TBGE)
        for slot in self.hooked_slots:
            whole = (self.gathered.take(slot.operand), self.gathered.take(slot))
            call_operand_hooks(work.precision, slot, *whole, by_sequence)
        self.hook(BACKWARD, PRE, "grad_output", by_token(work.tensors[Operand.DO], work.B))
        if "grad_scores" in self.wanted:
            self.hook(BACKWARD, PRE, "grad_scores", by_sequence(self.gathered.take(Operand.DS)))
        if "grad_attn_weights" in self.wanted:
            self.hook(BACKWARD, POST, "grad_attn_weights", by_sequence(self.gathered.take("dP")))
        for name, x in (("query", dq), ("key", dk), ("value", dv)):
            self.hook(BACKWARD, POST, f"grad_{name}", x)
        return dq, dk, dv
