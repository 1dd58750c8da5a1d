"""The products of attention tile by tile, each operand held as the scheme declares for the whole of it.

    # T tokens (queries or keys), B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    # N = B*H; K keys of a tile; R rows, the queries of a tile

q, k, v and dO are quantised whole and cut into tiles; P and dS are quantised as tiles, under the amax of the whole
where a scale of the whole follows from that, and with the random numbers that their elements have in the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quantexp.formats import Place
from quantexp.quant.attention.plain import by_head, by_token, expanded, product_scale
from quantexp.quant.attention.tiles import Tile, tiles
from quantexp.quant.hooks import as_it_is, tell_operand
from quantexp.quant.multiply import multiply
from quantexp.quant.operand import follows_own_amax, held, held_by_two, own_amax
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import Announcement, Part
from quantexp.quant.sites import PRODUCTS, Product, Site
from quantexp.quant.slots import Operand
from quantexp.quant.weight_cache.policy import shares_read

#: From the scores of a tile, [B, H, R, K], and its first query to their probabilities, row by row, differentiable.
Probabilities = Callable[[Tensor, int], Tensor]
Slot = tuple[Site, Product, str]

#: What only a tile holds, beside the operands of T x D.
WITHIN = ("P", "dS")
P_FORWARD: Slot = (Site.PV, Product.FPROP, "P")
P_BACKWARD: Slot = (Site.PV, Product.DGRAD_V, "P")
DS_BY_KEYS: Slot = (Site.QK, Product.DGRAD_Q, "dS")
DS_BY_QUERIES: Slot = (Site.QK, Product.DGRAD_K, "dS")

_TRANSPOSED: set[Slot] = {
    (Site.QK, Product.FPROP, "k"),
    (Site.PV, Product.DGRAD_P, "v"),
    P_BACKWARD,
    DS_BY_QUERIES,
}
#: Products over queries, summed over tiles.
_SUMMED = (Product.DGRAD_V, Product.DGRAD_K)


class TileProducts:
    """One micro-batch of one module's attention: its tensors, and its products tile by tile."""

    def __init__(
        self,
        precision: ModulePrecision,
        q_TBHD: Tensor,
        softmax_scale: float,
        probabilities: Probabilities,
        *,
        can_shorten: bool,
    ) -> None:
        self.precision = precision
        self.softmax_scale = softmax_scale
        self.probabilities = probabilities
        self.T, self.B, self.H, _ = q_TBHD.shape
        self.dtype = q_TBHD.dtype
        #: Whether keys after a tile's last query may be left out.
        self.can_shorten = can_shorten
        #: What the operands of T x D are made from; only within a pass, as the graph keeps q, k and v.
        self.tensors: dict[str, Tensor] = {}
        self._held: dict[Slot, Tensor] = {}
        #: Of P and dS over all tiles, where a scale follows from it.
        self.amaxes: dict[Slot, Tensor] = {}

    def operand(self, slot: Slot) -> Operand:
        """What is declared."""
        return self.precision.operand(*slot)

    def tiles(self, *, whole_rows: bool) -> list[Tile]:
        """The tiles of a pass; with rows over all keys where they are put together again."""
        operands = [e.operand for e in self.precision.entries() if e.name in WITHIN]
        return tiles(self.T, operands, to_last_query=self.can_shorten and not whole_rows)

    @contextlib.contextmanager
    def made_from(self, **tensors: Tensor) -> Iterator[None]:
        """A pass: what its operands of T x D are made from."""
        self.tensors = tensors
        try:
            yield
        finally:
            self.tensors, self._held = {}, {}

    def held(self, slot: Slot) -> Tensor:
        """An operand of T x D, held as declared, as it lies; made and told once in a pass."""
        if slot not in self._held:
            name, operand = slot[2], self.operand(slot)
            x = self.tensors[name]
            result = self._held[slot] = held(x, operand, dim_of(name, operand))
            if slot[1] is not Product.FPROP or "dO" not in self.tensors:
                layout = (lambda x_NTD: by_token(x_NTD, self.B)) if name == "dO" else as_it_is
                tell_operand(self.precision, *slot, x, result, layout)
        return self._held[slot]

    def whole(self, slot: Slot) -> Tensor:
        """The same for all tiles, [N, T, D]."""
        return self._by_head(slot[2], self.held(slot))

    def _by_head(self, name: str, x: Tensor) -> Tensor:
        return x if name == "dO" else by_head(expanded(x, self.H))

    def within(self, slot: Slot, tile: Tile, x_NRK: Tensor) -> Tensor:
        """A tile of P or dS, held as declared."""
        operand, amax = self.operand(slot), self.amaxes.get(slot)
        place = Place((self.B * self.H, self.T, self.T), (0, tile.start, 0))
        return held(x_NRK, operand, dim_of(slot[2], operand), amax, place=place)

    def within_both(
        self, first: Slot, second: Slot, tile: Tile, x_NRK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A tile of dS as two products hold it, from one read where they share it."""
        if not self.shares_read(first, second):
            return self.within(first, tile, x_NRK), self.within(second, tile, x_NRK)
        one, other = self.operand(first), self.operand(second)
        axes = (dim_of(first[2], one), dim_of(second[2], other))
        left, right = held_by_two(x_NRK, one, other, axes, amax=self.amaxes.get(first))
        assert right is not None
        return left, right

    def shares_read(self, first: Slot, second: Slot) -> bool:
        """Whether two products hold dS alike but for the axis of blocks; then its amax is one, too."""
        return shares_read(self.operand(first), self.operand(second))

    def see(self, slot: Slot, x_NRK: Tensor) -> None:
        """Take a tile of P or dS into account for the amax of the whole."""
        operand = self.operand(slot)
        amax = own_amax(x_NRK, operand, dim_of(slot[2], operand))
        known = self.amaxes.get(slot)
        self.amaxes[slot] = amax if known is None else torch.maximum(known, amax)

    def scores(self, tile: Tile, q_NTD: Tensor, k_NTD: Tensor, *, again: bool = False) -> Tensor:
        """S of a tile, [N, R, K]."""
        return self.product(
            Site.QK, Product.FPROP, tile, q_NTD[:, tile.rows], k_NTD[:, tile.keys], again=again
        )

    def softmax(self, S_NRK: Tensor, tile: Tile) -> Tensor:
        """P of a tile. The stock softmax masks float32 scores where they are, so it gets a copy."""
        S = S_NRK.clone().view(self.B, self.H, *S_NRK.shape[1:])
        return self.probabilities(S, tile.start).reshape(S_NRK.shape)

    def product(
        self,
        site: Site,
        product: Product,
        tile: Tile,
        left: Tensor,
        right: Tensor,
        source: Tensor | None = None,
        *,
        again: bool = False,
    ) -> Tensor:
        """One product of a tile, of held operands as they lie in it; float32 of those that are summed over tiles.

        `source` is what P or dS was made from.
        """
        names = (PRODUCTS[site][product].left, PRODUCTS[site][product].right)

        def laid(name: str, x: Tensor) -> Tensor:
            return x.transpose(1, 2) if (site, product, name) in _TRANSPOSED else x

        def before(name: str) -> Tensor:
            if name in WITHIN:
                assert source is not None
                return laid(name, source)
            extent = tile.rows if name in ("q", "dO") else tile.keys
            return laid(name, self._by_head(name, self.tensors[name])[:, extent])

        part = Part(
            tile.index, tile.last, self.dtype, lambda name: self._amax((site, product, name))
        )
        said = Announcement(
            self.precision.module,
            site,
            product,
            sources=lambda: (before(names[0]), before(names[1])),
            part=part,
            again=again,
        )
        scale = product_scale(self.precision, site, product)
        if (site, product) == (Site.QK, Product.FPROP):
            scale *= self.softmax_scale
        if product in _SUMMED:
            left, right = left.float(), right.float()
        return multiply(said, laid(names[0], left), laid(names[1], right), scale)

    def _amax(self, slot: Slot) -> Tensor | None:
        """The amax of the tensor that an operand is a part of, where its scale follows from that."""
        name, operand = slot[2], self.operand(slot)
        if not follows_own_amax(operand):
            return None
        if name in WITHIN:
            return self.amaxes.get(slot)
        return own_amax(self.tensors[name], operand, dim_of(name, operand))


def dim_of(name: str, operand: Operand) -> int:
    """The dimension that an operand's blocks run along: of [T, B, H, D], dO [N, T, E], P and dS [N, R, K]."""
    if operand.axis == "head_dim" or (name in WITHIN and operand.axis == "keys"):
        return -1
    return 1 if name in (*WITHIN, "dO") else 0
