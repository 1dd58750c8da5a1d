"""The products of attention, tile by tile, on operands quantised as for the whole tensor.

    # T tokens (queries or keys), B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    # N = B*H; K keys of a tile; R rows, the queries of a tile

q, k, v and dO are quantised whole, then cut into tiles. P and dS are quantised per tile. If their scale depends on an
amax, it is the amax of the whole tensor; random numbers are those of the elements' positions in the whole tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quantexp.formats import Family, Place, QuantSpec, Rounding
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.plain import by_head, by_token, expanded
from quantexp.quant.attention.row_sums import OutputSums
from quantexp.quant.attention.tiles import Tile, tiles
from quantexp.quant.hooks import same_layout
from quantexp.quant.multiply import (
    multiply,
    product_scale,
    quantise_operand,
    quantise_pair,
    quantised_operand,
    source_of,
)
from quantexp.quant.product_context import Part, ProductContext
from quantexp.quant.sharing import shares_read
from quantexp.quant.sites import (
    DGRAD_K_DS,
    DGRAD_P_V,
    DGRAD_V_P,
    FPROP_K,
    FPROP_P,
    Operand,
    Product,
    Site,
    Slot,
    dim_of,
    operands_of,
)
from quantexp.quant.step_state import Piece, current_state
from quantexp.quant.whole_amax import follows_own_amax, own_amax, reduced

#: Maps the scores of a tile, [B, H, R, K], and its first query to probabilities, row by row; differentiable. Under
#: `delta: o` a third argument has the `OutputSums` of the rows for the derivative.
Probabilities = Callable[..., Tensor]
#: Maps the same two to E and l (`row_sums`).
RowSums = Callable[[Tensor, int], tuple[Tensor, Tensor]]

#: Operands that exist only as tiles, as opposed to operands of T x D.
TILE_OPERANDS = (Operand.P, Operand.DS)
_TRANSPOSED = {FPROP_K, DGRAD_P_V, DGRAD_V_P, DGRAD_K_DS}
#: Products that reduce over queries, summed over tiles.
_SUMMED = (Product.DGRAD_V, Product.DGRAD_K)


class TileProducts:
    """One micro-batch of one attention module: its tensors, and its products tile by tile."""

    def __init__(
        self,
        call: AttentionCall,
        q_TBHD: Tensor,
        probabilities: Probabilities,
        exponentials: RowSums | None = None,
    ) -> None:
        self.call = call
        self.precision = call.precision
        self.probabilities, self.exponentials = probabilities, exponentials
        self.T, self.B, self.H, _ = q_TBHD.shape
        self.dtype = q_TBHD.dtype
        self.num_keys = self.T if call.share is None else self.T * call.share.num_ranks
        #: Whether keys after a tile's last query may be skipped.
        self.can_shorten = call.mask is None and call.share is None and self.dtype != torch.float32
        #: The operands of T x D before quantisation, set only during a pass: the graph already keeps q, k and v.
        self.tensors: dict[Operand, Tensor] = {}
        self._quantised: dict[Slot, Tensor] = {}
        #: Amax of P and dS over all tiles, for slots whose scale depends on it.
        self.amaxes: dict[Slot, Tensor] = {}

    def spec(self, slot: Slot) -> QuantSpec:
        """What the module declares for a slot."""
        return self.precision.spec(slot)

    def tiles(self, *, whole_rows: bool) -> list[Tile]:
        """The tiles of a pass; their rows span all keys if the tiles are to be assembled again."""
        slots = self.precision.slots.items()
        specs = [
            spec
            for slot, spec in slots
            if slot.operand in TILE_OPERANDS or spec.fmt.family is Family.GRID
        ]
        shortens = self.can_shorten and not whole_rows
        return tiles(self.T, specs, to_last_query=shortens, num_keys=self.num_keys)

    @contextlib.contextmanager
    def inputs(self, q: Tensor, k: Tensor, v: Tensor, dO: Tensor | None = None) -> Iterator[None]:
        """One pass with these operands of T x D, before quantisation."""
        self.tensors = {Operand.Q: q, Operand.K: k, Operand.V: v}
        if dO is not None:
            self.tensors[Operand.DO] = dO
        try:
            yield
        finally:
            self.tensors, self._quantised = {}, {}

    def quantised(self, slot: Slot) -> Tensor:
        """A quantised operand of T x D in its own layout; quantised and passed to the hooks once per pass."""
        if slot not in self._quantised:
            x = source_of(self.precision, slot, self.tensors[slot.operand])
            is_dO = slot.operand is Operand.DO
            layout = (lambda x_NTD: by_token(x_NTD, self.B)) if is_dO else same_layout
            is_again = slot.product is Product.FPROP and Operand.DO in self.tensors
            self._quantised[slot] = quantised_operand(
                self.precision, slot, x, layout, is_shown=not is_again
            )
        return self._quantised[slot]

    def whole(self, slot: Slot) -> Tensor:
        """The quantised operand for all tiles, [N, T, D]."""
        return self._by_head(slot.operand, self.quantised(slot))

    def _by_head(self, operand: Operand, x: Tensor) -> Tensor:
        return x if operand is Operand.DO else by_head(expanded(x, self.H))

    def quantised_tile(self, slot: Slot, tile: Tile, x_NRK: Tensor) -> Tensor:
        """One tile of P or dS, quantised according to its slot."""
        spec, amax = self.spec(slot), self.amaxes.get(slot)
        pieces = self._pieces(spec, tile) if spec.rounding is Rounding.STOCHASTIC else ()
        return quantise_operand(x_NRK, spec, dim_of(slot.operand, spec), amax, pieces=pieces)

    def _pieces(self, spec: QuantSpec, tile: Tile) -> Sequence[Piece]:
        """The pieces of a tile of P or dS, cut from those of the rank's part."""
        shape = (self.B * self.H, self.T, self.num_keys)
        whole = (slice(shape[0]), slice(0, self.T), tile.keys), Place(shape, (0, 0, 0))
        pieces = []
        for (heads, rows, _), place in current_state().pieces(spec, shape) or [whole]:
            start, stop = max(rows.start, tile.start), min(rows.stop, tile.stop)
            if start < stop:
                indices = heads, slice(start - tile.start, stop - tile.start), tile.keys
                first, query, key = place.start
                place = Place(place.whole, (first, query + start - rows.start, key))
                pieces.append((indices, place))
        return pieces

    def quantised_tile_pair(
        self, first: Slot, second: Slot, tile: Tile, x_NRK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One tile of dS quantised for two products, from one read if they share it."""
        if not self.shares_read(first, second):
            return self.quantised_tile(first, tile, x_NRK), self.quantised_tile(second, tile, x_NRK)
        specs = self.spec(first), self.spec(second)
        axes = dim_of(first.operand, specs[0]), dim_of(second.operand, specs[1])
        left, right = quantise_pair(x_NRK, *specs, axes, amax=self.amaxes.get(first))
        assert right is not None
        return left, right

    def shares_read(self, first: Slot, second: Slot) -> bool:
        """Whether two products quantise dS alike except for the axis of blocks; then they share its amax, too."""
        return shares_read(self.spec(first), self.spec(second))

    def observe(self, slot: Slot, x_NRK: Tensor) -> None:
        """Include a tile of P or dS in the amax of this rank's part of the tensor."""
        spec = self.spec(slot)
        amax = own_amax(x_NRK, spec, dim_of(slot.operand, spec))
        known = self.amaxes.get(slot)
        self.amaxes[slot] = amax if known is None else torch.maximum(known, amax)

    def reduce_amax(self, slot: Slot) -> None:
        """After the last tile: the amax of the whole tensor, over all ranks."""
        self.amaxes[slot] = reduced(self.precision.module, self.amaxes[slot])

    def scores(
        self, tile: Tile, q_NTD: Tensor, k_NTD: Tensor, *, recomputed: bool = False
    ) -> Tensor:
        """S of a tile, [N, R, K]."""
        return self.product(
            Site.QK,
            Product.FPROP,
            tile,
            q_NTD[:, tile.rows],
            k_NTD[:, tile.keys],
            recomputed=recomputed,
        )

    def softmax(self, S_NRK: Tensor, tile: Tile, delta: OutputSums | None = None) -> Tensor:
        """P of a tile. The stock softmax masks float32 scores in place, so it gets a copy."""
        S = S_NRK.clone().view(self.B, self.H, *S_NRK.shape[1:])
        of_delta = () if delta is None else (delta,)
        return self.probabilities(S, tile.start, *of_delta).reshape(S_NRK.shape)

    def multiplied(self, S_NRK: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor | None]:
        """P of a tile, what of it enters the product with v, and the row sums that divide this, if any do."""
        P = self.softmax(S_NRK, tile)
        if not self.spec(FPROP_P).softmax.unnormalised:
            return P, P, None
        assert self.exponentials is not None
        E, sums = self.exponentials(S_NRK.view(self.B, self.H, *S_NRK.shape[1:]), tile.start)
        return P, E.view(S_NRK.shape), sums.view(*S_NRK.shape[:2], 1)

    def product(
        self,
        site: Site,
        product: Product,
        tile: Tile,
        left: Tensor,
        right: Tensor,
        *,
        recomputed: bool = False,
    ) -> Tensor:
        """One product of a tile, of quantised operands; float32 for products that are summed over tiles."""
        slots = operands_of(site, product)

        def oriented(slot: Slot, x: Tensor) -> Tensor:
            return x.transpose(1, 2) if slot in _TRANSPOSED else x

        part = Part(tile.index, tile.last, tile.rows, tile.keys, self._amax)
        call_context = ProductContext(
            self.precision.module,
            site,
            product,
            part=part,
            recomputed=recomputed,
            widened_from=self.dtype if product in _SUMMED else None,
        )
        scale = product_scale(self.precision, site, product)
        if (site, product) == (Site.QK, Product.FPROP):
            scale *= self.call.softmax_scale
        if product in _SUMMED:
            left, right = left.float(), right.float()
        return multiply(call_context, oriented(slots[0], left), oriented(slots[1], right), scale)

    def _amax(self, slot: Slot) -> Tensor | None:
        """The amax of a whole P or dS, if its scale depends on it."""
        is_scaled = slot.operand in TILE_OPERANDS and follows_own_amax(self.spec(slot))
        return self.amaxes.get(slot) if is_scaled else None
