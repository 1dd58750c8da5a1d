"""Samples complete blocks of a tensor, evenly spaced.

A few long rows or wide strips would miss channels, so single blocks are taken: one from each of equal strata of all
blocks, its place within moved by the golden ratio (see `quantexp.analysis.tensors.sample`). The same tensor always
gives the same blocks. A short last block is not among them, unless the axis has no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantexp.analysis.tensors.rows import rows_of
from quantexp.analysis.tensors.sample import evenly_spread


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
