"""What the gradient of k or v must be, a sum over the heads of a group and over the ranks of a sequence.

# T keys, B sequences, G key-value heads, D head_dim
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from quantexp.proof.border import SequenceShares, Unit, added, some_rows
from quantexp.proof.heads import Heads
from quantexp.proof.products import Expected, Reference
from quantexp.quant.sites import FPROP_K, FPROP_V, Site


def summed(
    heads: Heads,
    shares: SequenceShares,
    gradient_TBGD: Tensor,
    unit: Unit,
    dims: Tensor,
    scale: float,
) -> tuple[Tensor, Expected]:
    """The chosen elements of the gradient, and what they must be; `scale` is that of the product."""
    keys, is_own = heads.keys, None
    parts = [heads.product(unit, keys, dims, scale, head) for head in heads.heads]
    clipped = heads.clipped(FPROP_K if unit[0] is Site.QK else FPROP_V, keys, dims)

    def expected() -> Reference:
        result = reduce(Reference.plus, (part() for part in parts))
        # Summed over the group, and scaled.
        result = result.again().scaled_last(scale).zero_where(clipped)
        if is_own is None:
            return result
        return some_rows(added(result, shares.add, 0), is_own)

    if shares.size > 1:
        own = shares.own(len(gradient_TBGD)).to(keys.device)
        is_own = torch.isin(keys, own)
        order = own.argsort()
        keys = order[torch.searchsorted(own[order], keys[is_own])]
    return gradient_TBGD[:, heads.sequence, heads.group][keys][:, dims], expected
