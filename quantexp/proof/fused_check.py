"""What the check of fused attention looks at: rows of o, dq, dk and dv, and their contrasts to alternatives.

# T queries, K keys, B sequences, H query heads, D head_dim, E head_dim of values
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quantexp.proof.contrast import MULTIPLE, Contrast, Contrasts, Rounded, contrast, multiplicity
from quantexp.proof.fused_reference import FusedRows
from quantexp.proof.heads import OVER_QUERIES, Heads
from quantexp.proof.products import Expected, Reference
from quantexp.quant.sites import DGRAD_V_DO, FPROP_K, FPROP_Q, FPROP_V, Operand, Product, Slot

#: Elements of P that the check of dk and dv computes at most.
_MOST = 1 << 22
_FORWARD = (FPROP_Q, FPROP_K, FPROP_V)
#: The operand of each gradient, whose slot may clip it.
_CLIPPING = dict(zip((Product.DGRAD_Q, Product.DGRAD_K, Product.DGRAD_V), _FORWARD, strict=True))


def fused_expected(
    heads: Heads, product: Product, seen: Tensor, scale: float
) -> tuple[Tensor, Expected]:
    """Some rows of a tensor of one head, and what they must be; `scale` is the softmax's."""
    rows, of_rows = _reference(heads, product, scale)
    return seen[rows], lambda: of_rows


def _reference(heads: Heads, product: Product, scale: float) -> tuple[Tensor, Reference]:
    """The numbers of the rows, and what they must be.

    These are o and dq of the chosen queries of the first head, and dk and dv of some of the last keys, which few
    queries see under a causal mask, over the group.
    """
    T, K = heads.num_queries, heads.num_keys
    if product not in OVER_QUERIES:
        rows, keys = heads.queries, torch.arange(K, device=heads.queries.device)
        return rows, _Look(heads.of_head(heads.heads[0]), product, rows, keys, scale).expected
    first = K - max(1, min(K, _MOST // (K * len(heads.heads))))
    rows = torch.arange(first if heads.mask is None else 0, T, device=heads.keys.device)
    keys = heads.keys[heads.keys >= first]
    if not len(keys):
        keys = torch.arange(max(first, K - len(heads.keys)), K, device=rows.device)
    return keys, _Look(heads, product, rows, keys, scale).expected


def fused_contrasts(
    heads: Heads, product: Product, x: Tensor, scale: float, most: int, *, is_each: bool
) -> dict[str, Contrast]:
    """How much of its alternatives is in o [T, B, H, E], or in the gradient of q, k or v that a product makes.

    The alternatives are the results of the originals of all quantised operands, with `is_each` also of each alone, and
    a multiple of the expected result. Heads are taken from the first that the check looks at, and queries or keys of
    each, until `most` elements of P are computed.
    """
    T, K, by_keys = heads.num_queries, heads.num_keys, product in OVER_QUERIES
    if by_keys:
        first = K - max(1, min(K, most // (K * len(heads.heads))))
        rows = torch.arange(first if heads.mask is None else 0, T, device=x.device)
        keys = torch.arange(first, K, device=x.device)
    else:
        rows = heads.some_queries(min(T, most // K))
        keys = torch.arange(K, device=x.device)
    total = Contrasts()
    for own in heads.onward(max(1, most // (len(rows) * K)), by_group=by_keys):
        of_head = x[:, own.sequence, own.group if by_keys else own.heads[0]]
        look = _Look(own, product, rows, keys, scale)
        total.add(look.contrasts(of_head[keys if by_keys else rows], is_each=is_each))
    return total.sums


@dataclass(frozen=True)
class _Look:
    """Some rows of one result: o or dq of queries of a head, dk or dv of keys, a sum over a group of heads."""

    heads: Heads
    product: Product
    queries: Tensor
    keys: Tensor
    scale: float

    @cached_property
    def expected(self) -> Reference:
        """With its bounds."""
        total, *others = [
            rows.product(self.product, dO, self.keys)
            for rows, dO in zip(self._attention(()), self._gradients, strict=True)
        ]
        for other in others:
            total = total.plus(other)
        return self._clipped(total.again(2) if self.product in OVER_QUERIES else total)

    def contrasts(self, seen: Tensor, *, is_each: bool) -> dict[str, Contrast]:
        """Those of what was seen to all alternatives."""
        parts, expected, heads = self._parts(()), self.expected, self.heads
        slots = [slot for slot in _FORWARD if heads.call.spec(slot).quantised]
        alternatives = {" and ".join(slot.operand.value for slot in slots): slots} if slots else {}
        if is_each:
            alternatives |= {slot.operand.value: [slot] for slot in slots}
        equal = max(
            multiplicity(own[FPROP_Q]) * multiplicity(own[FPROP_K]) for own in self._operands
        )
        result = {MULTIPLE: contrast(seen, expected, parts, None, equal)}
        for name, originals in alternatives.items():
            values = torch.stack([p.left @ p.right for p in self._parts(originals)]).sum(dim=0)
            other = self._clipped(replace(expected, values=values)).values
            result[name] = contrast(seen, expected, parts, other, equal)
        return result

    def _parts(self, originals: Sequence[Slot]) -> list[Rounded]:
        return [
            rows.rounded(self.product, dO, self.keys)
            for rows, dO in zip(self._attention(originals), self._gradients, strict=True)
        ]

    def _attention(self, originals: Sequence[Slot]) -> Iterator[FusedRows]:
        heads, keys = self.heads, torch.arange(self.heads.num_keys, device=self.queries.device)
        hidden = keys > self.queries[:, None]
        if heads.mask is not None:
            hidden = heads.mask[heads.sequence % heads.mask.shape[0], 0, self.queries]
        for expected, sources in zip(self._operands, self._sources, strict=True):
            q, k, v = ((sources if s in originals else expected)[s] for s in _FORWARD)
            yield FusedRows.of(q, k, v, hidden, self.scale)

    @cached_property
    def _operands(self) -> list[dict[Slot, Tensor]]:
        """q of the queries, k and v, as each head must multiply them."""
        heads, call = self.heads, self.heads.call
        keys = torch.arange(heads.num_keys, device=self.queries.device)
        dims = torch.arange(call.sources[Operand.V].shape[3], device=keys.device)
        return [
            {
                FPROP_Q: heads.lines(FPROP_Q, self.queries, head)(),
                FPROP_K: heads.lines(FPROP_K, keys, head)(),
                FPROP_V: heads.lines(FPROP_V, dims, head)().t(),
            }
            for head in heads.heads
        ]

    @cached_property
    def _sources(self) -> list[dict[Slot, Tensor]]:
        """The same before quantisation."""
        sources, sequence = self.heads.call.sources, self.heads.sequence
        k, v = (sources[each][:, sequence, self.heads.group] for each in (Operand.K, Operand.V))
        q = sources[Operand.Q][:, sequence][self.queries]
        return [{FPROP_Q: q[:, head], FPROP_K: k, FPROP_V: v} for head in self.heads.heads]

    @cached_property
    def _gradients(self) -> list[Tensor | None]:
        """dO of the queries of each head, in float64; None of o, which needs none."""
        heads = self.heads
        if self.product is Product.FPROP:
            return [None] * len(heads.heads)
        dims = torch.arange(heads.call.sources[Operand.DO].shape[2], device=self.queries.device)
        lines = [heads.lines(DGRAD_V_DO, dims, head)() for head in heads.heads]
        return [own.t()[self.queries].double() for own in lines]

    def _clipped(self, expected: Reference) -> Reference:
        slot = _CLIPPING.get(self.product)
        rows = self.keys if self.product in OVER_QUERIES else self.queries
        return expected if slot is None else expected.zero_where(self.heads.clipped(slot, rows))
