"""Outlier channels and heads: the largest magnitude and the energy of each relative to the others.

    amax_c = max over a channel's elements of |x|           energy_c = sum over them of x^2
    amax ratio = max_c amax_c / median_c amax_c             top energy = that of the 1 % of channels with the most

Which dimensions number the channels and the heads follows from the captured layouts:

    linear      input, output and their gradients [tokens, sequences, width]: width; weights: the input width
    attention   query, key, value, grad_* [tokens, sequences, heads, head_dim]: heads x head_dim, and heads
                attn_weights and their gradients [sequences, heads, queries, keys]: heads alone
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: The fraction of groups in the energy sum.
TOP_SHARE = 0.01
#: Maximum groups whose numbers are all kept, which includes heads.
MOST_LISTED = 256
_CHUNK_ELEMENTS = 1 << 20
#: Tensors with [sequences, heads, queries, keys].
_PER_QUERY = frozenset({"attn_weights", "exp_scores", "grad_attn_weights", "grad_scores"})


@dataclass(frozen=True)
class Outliers:
    """The inequality of a tensor's groups (channels, heads); NaN and Inf count as 0."""

    num_groups: int
    #: Largest amax over the median amax; inf if the median is 0, NaN if all are.
    amax_ratio: float
    #: The first group with the largest amax.
    largest: int
    #: The fraction of the sum of squares in the top ceil(1 %) of groups; NaN if the sum is 0.
    top_energy_share: float
    #: amax over the median amax at ranks 1, 2, 4, 8, ... and the last, descending.
    profile: tuple[float, ...]
    #: amax over the median amax of each group, in order; empty for more than `MOST_LISTED` groups.
    ratios: tuple[float, ...] = ()


def channel_dims(layer_type: str, tensor: str, ndim: int) -> tuple[int, ...] | None:
    """The dimensions of the channels; None if there are none."""
    if tensor in _PER_QUERY or ndim == 0:
        return None
    return (-2, -1) if layer_type == "attention" and ndim == 4 else (-1,)


def head_dims(layer_type: str, tensor: str, ndim: int) -> tuple[int, ...] | None:
    """The dimension of the heads; None if the layout has none."""
    if layer_type != "attention" or ndim != 4:
        return None
    return (1,) if tensor in _PER_QUERY else (2,)


def outliers(x: Tensor, dims: tuple[int, ...]) -> Outliers | None:
    """The inequality of the groups along `dims`; None for an empty tensor."""
    if x.numel() == 0:
        return None
    amax_G, energy_G = (t.reshape(-1).double() for t in _amax_and_energy(x.detach(), dims))
    median = float(amax_G.quantile(0.5)) if amax_G.numel() < 1 << 24 else float(amax_G.median())
    ordered = amax_G.sort(descending=True).values
    num_groups = amax_G.numel()
    top = math.ceil(TOP_SHARE * num_groups)
    total = float(energy_G.sum())
    return Outliers(
        num_groups,
        _ratio(float(ordered[0]), median),
        int(amax_G.argmax()),
        float(energy_G.topk(top).values.sum()) / total if total else math.nan,
        tuple(_ratio(float(ordered[rank - 1]), median) for rank in profile_ranks(num_groups)),
        tuple(_ratio(amax, median) for amax in amax_G.tolist())
        if num_groups <= MOST_LISTED
        else (),
    )


def profile_ranks(num_groups: int) -> list[int]:
    """1, 2, 4, ... and the number of groups."""
    powers = [1 << k for k in range(num_groups.bit_length())]
    return powers if powers[-1] == num_groups else [*powers, num_groups]


def _ratio(part: float, whole: float) -> float:
    if whole == 0:
        return math.inf if part else math.nan
    return part / whole


def _amax_and_energy(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """amax and energy of each group, by chunks along the longest other dimension."""
    groups = {dim % x.ndim for dim in dims}
    others = [dim for dim in range(x.ndim) if dim not in groups]
    if not others:
        x, others = x.unsqueeze(0), [0]
    along = max(others, key=lambda dim: x.shape[dim])
    size = max(1, _CHUNK_ELEMENTS * x.shape[along] // x.numel())
    shape = [extent for dim, extent in enumerate(x.shape) if dim not in others]
    amax = torch.zeros(shape)
    energy = torch.zeros(shape, dtype=torch.float64)
    for part in torch.split(x, size, along):
        wide = part.to(torch.float32).nan_to_num(0.0, 0.0, 0.0)
        amax = torch.maximum(amax, wide.abs().amax(others))
        energy += wide.square().sum(others, dtype=torch.float64)
    return amax, energy
