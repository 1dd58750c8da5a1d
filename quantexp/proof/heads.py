"""What the check of one call of attention looks at: some lines of one group of heads, and what it keeps of P and dS.

# T queries, K keys, B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
# R rows of a tile, g heads of a group, N = B*H
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from quantexp.formats import Axis
from quantexp.proof.call import EXPONENTIALS, Call, Source
from quantexp.proof.draws import lines
from quantexp.proof.expected import Images, Plane, own_amax_of
from quantexp.proof.lines import Lines
from quantexp.proof.places import place_of
from quantexp.proof.products import Expected, reference
from quantexp.proof.softmax import Tile
from quantexp.quant.product_context import ProductContext
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
    Slot,
    operands_of,
)

#: Operands that exist as tiles.
TILES = (Operand.P, Operand.DS)
#: The products that reduce over queries.
OVER_QUERIES = (Product.DGRAD_K, Product.DGRAD_V)
#: The slots whose lines are queries, keys, dimensions of q and k, and of v.
_OF_QUERIES = (FPROP_Q, FPROP_P, DGRAD_P_DO, DGRAD_Q_DS)
_OF_KEYS = (FPROP_K, DGRAD_P_V, DGRAD_K_DS, DGRAD_V_P)
_OF_DIMS = (DGRAD_Q_K, DGRAD_K_Q)
_OF_VALUE_DIMS = (FPROP_V, DGRAD_V_DO)


#: The products that multiply rows and columns of P and dS.
_MULTIPLYING: dict[Source, tuple[tuple[Site, Product], tuple[Site, Product]]] = {
    Operand.P: ((Site.PV, Product.FPROP), (Site.PV, Product.DGRAD_V)),
    EXPONENTIALS: ((Site.PV, Product.FPROP), (Site.PV, Product.FPROP)),
    Operand.DS: ((Site.QK, Product.DGRAD_Q), (Site.QK, Product.DGRAD_K)),
}


@dataclass
class Kept:
    """What is kept of P or dS."""

    #: Of the first head of the group, [queries, K].
    rows: Tensor
    #: [g, T, keys]
    columns: Tensor


@dataclass
class Heads:
    """The sequence, the group of heads and the lines that the check of a call looks at."""

    call: Call
    #: The number of neighbouring lines that a slot's blocks need.
    run: Callable[[Slot], int]
    #: Whether a product is looked at.
    looks_at: Callable[[tuple[Site, Product]], bool]
    #: Numbers of lines of left and of right operands.
    numbers: tuple[int, int]
    #: True where a query does not see a key, [B or 1, 1, T, K]; None means causal.
    mask: Tensor | None = None
    #: Whether kernels compute o and the gradients of q, k and v.
    by_kernels: bool = False
    #: The first row of the tile whose softmax runs next.
    start: int = 0
    kept: dict[Source, Kept] = field(default_factory=dict)
    #: Of the chosen queries of the first head: the row sums of exp(S - m), [queries, 1], and o, [queries, E].
    sums: Tensor | None = None
    #: Scores and mask of the tile whose softmax runs, if a repeated maximum counts; None once they were looked at.
    scores: tuple[Tensor, Tensor | None] | None = None
    output: Tensor | None = None
    #: The tile whose softmax ran last, what left that, and its version.
    tile: Tile = field(default_factory=partial(Tile, 0))
    softmaxed: tuple[Callable[[], Tensor | None], int] = field(default=(lambda: None, 0))
    #: By slot and head, those of `lines_of` that were taken.
    _lines: dict[tuple[Slot, int], Lines] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _, B, H, _ = self.call.sources[Operand.Q].shape
        G = self.call.sources[Operand.K].shape[2]
        chosen = self.call.moment.choice(self.call.module, "attention")
        self.sequence, self.group, size = chosen.randrange(B), chosen.randrange(G), H // G
        self.heads = range(self.group * size, (self.group + 1) * size)

    @cached_property
    def queries(self) -> Tensor:
        """Lines of q, P, dO and dS."""
        return self._some(_OF_QUERIES, self.num_queries, self.numbers[0])

    @cached_property
    def keys(self) -> Tensor:
        """Lines of k, v, dS and P."""
        return self._some(_OF_KEYS, self.num_keys, self.numbers[1])

    @cached_property
    def dims(self) -> Tensor:
        """Lines of k and q in their backward products."""
        return self._some(_OF_DIMS, self.call.sources[Operand.Q].shape[3], self.numbers[1])

    @cached_property
    def value_dims(self) -> Tensor:
        """Lines of v and dO."""
        return self._some(_OF_VALUE_DIMS, self.call.sources[Operand.V].shape[3], self.numbers[1])

    def _some(self, slots: tuple[Slot, ...], extent: int, number: int) -> Tensor:
        chosen = self.call.moment.choice(self.call.module, slots[0])
        picked = lines(chosen, extent, max(map(self.run, slots)), number)
        return picked.to(self.call.sources[Operand.Q].device)

    @property
    def num_queries(self) -> int:
        """T."""
        return int(self.call.sources[Operand.Q].shape[0])

    @property
    def num_keys(self) -> int:
        """K."""
        return int(self.call.sources[Operand.K].shape[0])

    def of_head(self, head: int, sequence: int | None = None) -> Heads:
        """The same lines of one head of a sequence, by default of this one."""
        own = copy.copy(self)
        own.heads, own.group = range(head, head + 1), head // len(self.heads)
        own.sequence = self.sequence if sequence is None else sequence
        return own

    def onward(self, number: int, *, by_group: bool) -> Iterator[Heads]:
        """The same lines of so many heads, or of whole groups with so many, from this group and sequence on."""
        _, B, H, _ = self.call.sources[Operand.Q].shape
        size = len(self.heads)
        first = self.number(self.heads[0])
        for n in range(first, first + min(number, B * H), size if by_group else 1):
            sequence, head = divmod(n % (B * H), H)
            own = self.of_head(head, sequence)
            if by_group:
                own.heads = range(head, head + size)
            yield own

    def some_queries(self, number: int) -> Tensor:
        """So many queries, or as many as are looked at elsewhere; ascending."""
        if number <= len(self.queries):
            return self.queries
        chosen = self.call.moment.choice(self.call.module, "queries")
        return lines(chosen, self.num_queries, 1, number).to(self.queries.device)

    def number(self, head: int) -> int:
        """The matrix of a head among all N."""
        return self.sequence * int(self.call.sources[Operand.Q].shape[2]) + head

    def lines_of(self, slot: Slot) -> Tensor:
        """The lines of a slot's operand that are looked at."""
        if slot in _OF_QUERIES:
            return self.queries
        if slot in _OF_KEYS:
            return self.keys
        return self.dims if slot in _OF_DIMS else self.value_dims

    def in_tile(self, start: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """The chosen queries that lie in a tile, and their places in it."""
        if num_rows == self.num_queries:
            return self.queries, self.queries
        inside = self.queries[(self.queries >= start) & (self.queries < start + num_rows)]
        return inside, inside - start

    def keys_below(self, number: int) -> Tensor:
        """The chosen keys among the first."""
        return self.keys if number == self.num_keys else self.keys[self.keys < number]

    def rows_of(self, x_BHRK: Tensor, start: int) -> Tensor:
        """The chosen rows of the first head that lie in a tile."""
        _, at = self.in_tile(start, x_BHRK.shape[2])
        return x_BHRK[self.sequence, self.heads[0]][at]

    def hidden_rows(self, S_BHRK: Tensor, own: Callable[[int], Tensor], start: int) -> Tensor:
        """Where the chosen queries of a tile must not see a key: by the mask that entered, causal without one.

        `own` gives the places of the rank's queries in the sequence, whose keys are in order.
        """
        rows, _ = self.in_tile(start, S_BHRK.shape[2])
        places, number = own(self.num_queries).to(S_BHRK.device)[rows], S_BHRK.shape[3]
        if self.mask is not None:
            return self.mask[self.sequence % len(self.mask), 0, places, :number]
        return torch.arange(number, device=S_BHRK.device) > places[:, None]

    def by_head(self, o: Tensor) -> Tensor:
        """o as [T, B, H, E], of [T, B, H E]."""
        return o.reshape(*o.shape[:2], self.call.sources[Operand.Q].shape[2], -1)

    def keep(self, operand: Source, x_BHRK: Tensor, start: int) -> None:
        """Keep the chosen lines of a tile of P or dS, and the tile itself as the source of the product that follows."""
        B, H, R, K = x_BHRK.shape
        self.call.see(operand, x_BHRK.reshape(B * H, R, K))
        self.call.tile_start = start
        self._note_amaxes(operand)
        own = x_BHRK[self.sequence]
        group = own[self.heads.start : self.heads.stop]
        if self.num_queries == R and self.num_keys == K:
            by_query, by_key = map(self.looks_at, _MULTIPLYING[operand])
            self.kept[operand] = Kept(
                own[self.heads[0]][self.queries if by_query else slice(0)],
                group[:, :, self.keys if by_key else slice(0)],
            )
            return
        kept = self.kept.get(operand)
        if kept is None:
            kept = self.kept[operand] = Kept(
                x_BHRK.new_zeros(len(self.queries), self.num_keys),
                x_BHRK.new_zeros(len(self.heads), self.num_queries, len(self.keys)),
            )
        inside = (self.queries >= start) & (self.queries < start + R)
        kept.rows[inside, :K] = own[self.heads[0]][self.queries[inside] - start]
        within = self.keys < K
        kept.columns[:, start : start + R][:, :, within] = group[:, :, self.keys[within]]

    def _note_amaxes(self, operand: Source) -> None:
        call = self.call
        for slot, spec in call.declared.slots.items():
            if call.key(slot) == operand and spec.is_scaled:
                own = own_amax_of(call, slot, call.sources[operand])
                key = call.amax_key(slot)
                known = call.own_amaxes.get(key)
                call.own_amaxes[key] = own if known is None else torch.maximum(known, own)

    def lines(self, slot: Slot, picked: Tensor, head: int | None = None) -> Lines:
        """Lines of an expected operand of one head, [lines, extent of the reduced axis]."""
        head = self.heads[0] if head is None else head
        images = Images(self.call)
        if self.call.key(slot) in self.kept:
            among = self.keys if slot.product in OVER_QUERIES else self.queries
            at = torch.searchsorted(among, picked)
            return images.lines(slot, self._kept_plane(slot, head), at)
        if picked is not self.lines_of(slot):
            return images.lines(slot, self._plane(slot, head), picked)
        if (slot, head) not in self._lines:
            self._lines[slot, head] = images.lines(slot, self._plane(slot, head), picked)
        return self._lines[slot, head]

    def product(
        self,
        unit: tuple[Site, Product],
        rows: Tensor,
        columns: Tensor,
        scale: float,
        head: int | None = None,
    ) -> Expected:
        """What lines of its two expected operands give, of the first head if none is given."""
        left, right = operands_of(*unit)
        left_RK, right_CK = self.lines(left, rows, head), self.lines(right, columns, head)
        return lambda: reference(left_RK(), right_CK().t(), scale)

    def _plane(self, slot: Slot, head: int) -> Plane:
        """An operand of one head, but P and dS, as a plane."""
        images, call = Images(self.call), self.call
        is_whole = images.is_made_whole(slot)
        x = images.whole(slot) if is_whole else call.source(slot)
        if slot.operand is Operand.DO:
            shape = tuple(x.shape)
            start, stride, rows = place_of(call.pieces(slot, shape), shape, self.number(head))
            return Plane(x[self.number(head)], start, stride, rows, is_expected=is_whole)
        own = head if slot.operand is Operand.Q else self.group
        _, B, heads, D = x.shape
        start = (self.sequence * heads + own) * D
        return Plane(x[:, self.sequence, own], start, B * heads * D, is_expected=is_whole)

    def clipped(self, slot: Slot, rows: Tensor, dims: Tensor | None = None) -> Tensor | None:
        """Where the gradient of q, k or v is zero, as the forward operand saturated; None if its slot clips none."""
        clipped = Images(self.call).clipped(slot)
        if clipped is None:
            return None
        head = self.heads[0] if slot is FPROP_Q else self.group
        own = clipped[:, self.sequence, head][rows]
        return own if dims is None else own[:, dims]

    def drawn_operands(
        self, context: ProductContext, left: Tensor, right: Tensor
    ) -> Iterator[tuple[Slot, Tensor, Lines]]:
        """The chosen lines of a product's operands, and what they must be.

        The sums over queries of tiled attention are compared as products alone.
        """
        part, product = context.part, context.product
        if product in OVER_QUERIES and part is not None:
            return
        n = self.number(self.heads[0])
        slots = operands_of(context.site, product)
        for slot, matrix in zip(slots, (left[n], right[n].t()), strict=True):
            if slot.operand in TILES:
                if self.call.key(slot) not in self.kept:
                    continue
                if part is not None and self.call.spec(slot).is_scaled:
                    continue  # the whole tensor's amax is not known before its last tile
            elif slot.operand not in self.call.sources:
                continue
            picked = own = self.lines_of(slot)
            if part is not None and slot.is_left:
                picked, own = self.in_tile(part.rows.start, matrix.shape[0])
            elif part is not None and slot.axis is not Axis.KEYS:
                picked = own = self.keys_below(matrix.shape[0])
            if len(own):
                lines, seen = self.lines(slot, picked), matrix[own]
                if part is not None and seen.shape[1] < lines.source.shape[1]:
                    lines = Lines(lines()[:, : seen.shape[1]])
                yield slot, seen.to(lines.source.dtype), lines

    def _kept_plane(self, slot: Slot, head: int) -> Plane:
        """The kept lines of P or dS as a plane."""
        kept, call = self.kept[self.call.key(slot)], self.call
        B, H = call.sources[Operand.Q].shape[1:3]
        T, K = self.num_queries, self.num_keys
        shape = B * H, T, K
        start, stride, rows = place_of(call.pieces(slot, shape), shape, self.number(head))
        if slot.product in OVER_QUERIES:
            return Plane(kept.columns[head - self.heads[0]], start, stride, rows, self.keys)
        return Plane(kept.rows, start, stride, rows[self.queries])
