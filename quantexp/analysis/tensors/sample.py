"""Samples a bounded part of a tensor in complete blocks.

Legend: O all axes before the blocked one, N the blocked axis, I all axes after it.

Along the last axis whole rows are taken, along any other single blocks with a strip of what lies
behind them. They are spread evenly, one from each of equal strata, its place within the stratum
moved by the golden ratio: an even stride would meet the same head or micro-batch again and again.
The same tensor always gives the same sample.

A few long rows or wide strips would miss channels, so `spread_blocks` takes single blocks, from strata in the same
way. A short last block is not among them, unless the axis has no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantexp.analysis.tensors.operands import rows_of

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
    #: The padding elements of x (`quantexp.analysis.tensors.operands`); None without padding.
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


def spread_blocks(x: Tensor, dim: int, block: int, num_elements: int) -> tuple[Tensor, int]:
    """About `num_elements` of x in complete blocks, [blocks, block], and the dimension of the blocks.

    x itself, and `dim`, if it has no more, or if `num_elements` is 0, which means all.
    """
    if num_elements == 0 or x.numel() <= num_elements:
        return x, dim
    dim %= x.ndim
    x_ONI = x.reshape(math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :]))
    num_outer, extent, inner = x_ONI.shape
    block = min(block, extent)
    per_axis = extent // block
    places = evenly_spread(max(1, num_elements // block), num_outer * per_axis * inner)
    rest, i = places // inner, places % inner
    o, first = rest // per_axis, rest % per_axis * block
    return x_ONI[o[:, None], first[:, None] + torch.arange(block), i[:, None]], -1


def keeps_blocks(metadata: Mapping[str, Any], dim: int, block: int) -> bool:
    """Whether blocks along a dimension are complete in the captured sample of a tensor.

    A capture of sampled rows or heads has lost the neighbours of each; one of sampled blocks of 32 has them, but for
    the rows of an expert, whose blocks along tokens are of other rows than its neighbours.
    """
    sample = metadata.get("sample")
    if not sample or block == 1:
        return True
    num_dims = len(sample["shape"])
    if sample["axis"] % num_dims != dim % num_dims:
        return True
    if rows_of(metadata, dim) is not None:
        return False
    indices, extent = sample["indices"], sample["shape"][sample["axis"]]
    return all(
        run[0] % block == 0 and run == list(range(run[0], min(run[0] + block, extent)))
        for run in (indices[start : start + block] for start in range(0, len(indices), block))
    )
