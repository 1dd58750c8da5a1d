"""Samples a bounded part of a tensor in complete blocks.

Legend: O all axes before the blocked one, N the blocked axis, I all axes after it.

Along the last axis whole rows are taken, along any other single blocks with a strip of what lies
behind them. They are spread evenly, one from each of equal strata, its place within the stratum
moved by the golden ratio: an even stride would meet the same head or micro-batch again and again.
The same tensor always gives the same sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLE_ELEMENTS = 1 << 19
#: Elements behind the blocked axis that are sampled together.
_STRIP = 512
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class OperandSample:
    """A sample of an operand in complete blocks, ready to be quantised."""

    #: bf16, fp16 or fp32.
    x: Tensor
    #: The dimension of the blocks in x.
    dim: int
    #: The amax that determines a tensor scale, 0-dim; None without one.
    amax: Tensor | None = None
    #: The padding elements of x (`quantexp.analysis.tensors.rows`); None without padding.
    padding: Tensor | None = None

    @property
    def num_elements(self) -> int:
        """Elements of the sample, without padding."""
        return self.x.numel() - (0 if self.padding is None else int(self.padding.sum()))


def sample_blocks(
    x: Tensor, dim: int, block: int, limit: int = SAMPLE_ELEMENTS
) -> tuple[Tensor, int]:
    """At most `limit` elements (unless one block has more), and their blocked dimension.

    A tensor that is small enough comes back whole, as it is.
    """
    if x.numel() <= limit:
        return x, dim
    dim %= x.ndim
    x_ONI = x.reshape(math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :]))
    if x_ONI.shape[2] == 1:
        return _sample_rows(x_ONI[:, :, 0], block, limit), -1
    return _sample_groups(x_ONI, block, limit), 1


def evenly_spread(count: int, total: int) -> Tensor:
    """`count` increasing indices below `total`, one from each stratum; all indices if there are no more."""
    if count >= total:
        return torch.arange(total)
    i = torch.arange(count + 1)
    starts = i * total // count
    within = (i[:-1] * _GOLDEN) % 1.0 * starts.diff()
    return starts[:-1] + within.long()


def _sample_rows(x_ON: Tensor, block: int, limit: int) -> Tensor:
    length = min(x_ON.shape[1], max(block, limit // block * block))
    rows = evenly_spread(max(1, limit // length), x_ON.shape[0])
    return x_ON[:, :length].index_select(0, rows)


def _sample_groups(x_ONI: Tensor, block: int, limit: int) -> Tensor:
    """Groups of one block each, in strips; the whole axis if it is not longer than a block."""
    num_outer, extent, inner = x_ONI.shape
    block, width = min(block, extent), min(inner, _STRIP)
    num_groups, num_strips = extent // block, math.ceil(inner / width)
    parts = []
    total = num_outer * num_groups * num_strips
    for place in evenly_spread(max(1, limit // (block * width)), total).tolist():
        rest, strip = divmod(place, num_strips)
        o, group = divmod(rest, num_groups)
        start = min(strip * width, inner - width)
        parts.append(x_ONI[o, group * block : (group + 1) * block, start : start + width])
    return torch.stack(parts)
