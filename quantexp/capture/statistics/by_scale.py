"""MX fidelity from counts: counts elements by magnitude and block scale, and quantises each pair once.

The quantised value of an MX element depends only on its magnitude and its block's scale, and a 16-bit dtype has 32,768
magnitudes. The elements of a tensor are therefore counted by pairs of scale and magnitude, and every sum runs over the
pairs that occur, weighted by their counts, in float64. Quantising each element takes several times as long.

Magnitudes 40 binades or more below the largest magnitude of a scale are counted together as zero: every format of the
family rounds them to zero, and their squares are 2^-80 of the largest. It applies on a CPU, to 16-bit dtypes, complete
blocks, and tensors that are large compared with the number of magnitudes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from quantexp.formats import Family, QuantSpec, encode
from quantexp.quant.operand import quantise_operand

#: Below this number of elements, quantising all of them is as fast.
LEAST_ELEMENTS = {torch.bfloat16: 1 << 17, torch.float16: 1 << 20}

_E8M0_NAN = 255
_NUM_MAGNITUDES = 1 << 15
_MAGNITUDE = _NUM_MAGNITUDES - 1
#: The number of elements whose temporaries fit in the cache.
_CHUNK = 1 << 18
#: Distinct magnitudes below the largest of a scale: 40 binades of bfloat16, all of float16.
_NUM_TOLD_APART = {torch.bfloat16: 40 << 7, torch.float16: _NUM_MAGNITUDES}

# N blocks, K elements of a block, S the 256 scale bytes, G those that occur, R magnitudes from the largest of a scale
# downwards, U pairs of a scale and a magnitude that occur


@dataclass(frozen=True)
class ByScale:
    """A tensor counted by block scale and magnitude, without blocks that contain NaN or Inf."""

    #: The number of blocks for each E8M0 scale byte.
    blocks_S: Tensor
    #: Non-zero elements of the excluded blocks.
    num_left_out: Tensor
    #: Magnitudes in the tensor's dtype, their counts, their quantised values, and their scale bytes.
    magnitude_U: Tensor
    counts_U: Tensor
    held_U: Tensor
    scale_U: Tensor


def can_be_counted(x: Tensor, spec: QuantSpec, axis: int) -> bool:
    """Whether `by_scale` supports a tensor."""
    return (
        x.device.type == "cpu"
        and x.dtype in LEAST_ELEMENTS
        and x.numel() >= LEAST_ELEMENTS[x.dtype]
        and spec.fmt.family is Family.MX
        and x.shape[axis] % spec.block == 0
    )


def by_scale(x: Tensor, spec: QuantSpec, axis: int) -> ByScale:
    """Count a tensor's elements by their magnitude and the scales of its blocks along an axis."""
    bits_NK = x.movedim(axis, -1).reshape(-1, spec.block).view(torch.int16)
    size = max(1, _CHUNK // bits_NK.shape[1])
    byte_of, largest_S = _scales(spec, x.dtype)
    scale_N = torch.cat(
        [byte_of[_amax(bits_NK[i : i + size])] for i in range(0, len(bits_NK), size)]
    )
    blocks_S = torch.bincount(scale_N, minlength=_E8M0_NAN + 1)
    scale_G = blocks_S.nonzero().squeeze(1)
    R = _NUM_TOLD_APART[x.dtype]
    base_S = (largest_S - (R - 1)).clamp_min(0)
    first_S = torch.zeros(_E8M0_NAN + 1, dtype=torch.int32)
    first_S[scale_G] = torch.arange(0, R * len(scale_G), R, dtype=torch.int32)
    base_N1, first_N1 = base_S.to(torch.int16)[scale_N][:, None], first_S[scale_N][:, None]
    counts_GR = torch.zeros(len(scale_G), R, dtype=torch.int64)
    for start in range(0, len(bits_NK), size):
        chunk_NK, base, first = (t[start : start + size] for t in (bits_NK, base_N1, first_N1))
        below_NK = (chunk_NK & _MAGNITUDE).sub_(base).clamp_min_(0)
        pair_N = below_NK.to(torch.int32).add_(first).view(-1)
        counts_GR += torch.bincount(pair_N, minlength=counts_GR.numel()).view(-1, R)
    num_left_out = torch.zeros((), dtype=torch.int64)
    if blocks_S[_E8M0_NAN]:  # the last of those that occur
        num_left_out = torch.count_nonzero(bits_NK[scale_N == _E8M0_NAN] & _MAGNITUDE)
        scale_G, counts_GR = scale_G[:-1], counts_GR[:-1]
    group, below = counts_GR.nonzero().unbind(1)
    scale_U = scale_G[group]
    magnitude = torch.where(below > 0, below + base_S[scale_U], 0)
    # Each magnitude is paired with the largest magnitude of its scale, so that a block of both has that scale.
    beside = torch.stack([magnitude, largest_S[scale_U]], 1).to(torch.int16).view(x.dtype)
    held_U = quantise_operand(beside, replace(spec, block=2), 1)[:, 0]
    counts_U = counts_GR[group, below]
    return ByScale(blocks_S, num_left_out, beside[:, 0], counts_U, held_U, scale_U)


def _amax(bits_NK: Tensor) -> Tensor:
    """The bits of each block's largest magnitude, int64, by repeated halving; NaN is larger than any other value."""
    bits_NK = bits_NK & _MAGNITUDE
    while bits_NK.shape[1] > 1:
        half = bits_NK.shape[1] // 2
        bits_NK = torch.maximum(bits_NK[:, :half], bits_NK[:, half:])
    return bits_NK[:, 0].to(torch.int64)


@cache
def _scales(spec: QuantSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The E8M0 byte of a block by the bits of its amax, and the largest amax bits of each byte, 0 if there are none."""
    bits = torch.arange(_NUM_MAGNITUDES)
    amax = bits.to(torch.int16).view(dtype)
    _, scales = encode(amax, replace(spec, block=1))
    assert isinstance(scales, Tensor), "of one level: the MX family"
    byte_of = scales.reshape(-1).to(torch.int64)
    largest = torch.zeros(_E8M0_NAN + 1, dtype=torch.int64)
    return byte_of, largest.scatter_reduce(0, byte_of, bits, "amax")
