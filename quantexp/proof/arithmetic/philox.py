"""The random numbers of positions: Philox4x32-10 (Salmon et al., "Parallel random numbers", SC 2011).

    key      the seed         counter   position // 4 in the low half, the offset in the high half
    word     position % 4     bits      the upper 24 of a word

On a CPU with a compiler, compiled code (`philox.c`) computes them, ten times as fast.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.compiled import address, compiled
from quantexp.proof.arithmetic.layout import chunk_limit

SOURCE = Path(__file__).with_name("philox.c")
RANDOM_BITS = 24
_ROUNDS = 10
_LOW = (1 << 32) - 1


def random_integers(positions: Tensor, seed: int, offset: int) -> Tensor:
    """The numbers of positions (int64, of any shape), in [0, 2^24): int32 of their shape.

    Seed and offset lie in [0, 2^64).
    """
    numbers = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
    at_N, numbers_N = positions.contiguous().view(-1), numbers.view(-1)
    draw = _compiled() if positions.device.type == "cpu" else None
    if draw is not None:
        count = positions.numel()
        pointers = address(at_N, count, torch.int64), address(numbers_N, count, torch.int32)
        draw(*pointers, count, seed, offset)
    else:
        limit = chunk_limit(positions)
        for at, out in zip(torch.split(at_N, limit), torch.split(numbers_N, limit), strict=True):
            counters, index = torch.unique_consecutive(at >> 2, return_inverse=True)
            words = _words(counters, seed, offset)
            out.copy_(words.view(-1)[index * 4 + (at & 3)] >> (32 - RANDOM_BITS))
    return numbers


def integers_of_whole(x: Tensor, seed: int, offset: int) -> Tensor:
    """The numbers of all elements of a whole tensor, by their positions in row-major order: int32 of its shape."""
    numbers = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    start = 0
    for part in torch.split(numbers.view(-1), chunk_limit(x)):
        positions = torch.arange(start, start + part.numel(), device=x.device)
        part.copy_(random_integers(positions, seed, offset))
        start += part.numel()
    return numbers


@cache
def _compiled() -> Any:
    """The compiled function; None without a compiler."""
    library = compiled(SOURCE).library
    if library is None:
        return None
    library.draw.argtypes = (
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
        *(ctypes.c_uint64, ctypes.c_uint64),
    )
    library.draw.restype = None
    return library.draw


def _words(counters: Tensor, seed: int, offset: int) -> Tensor:
    """The four words of each counter, int64 [..., 4] in [0, 2^32)."""
    a, b = counters & _LOW, counters >> 32
    c, d = (torch.full_like(a, word) for word in (offset & _LOW, offset >> 32))
    for turn in range(_ROUNDS):
        k = (seed + turn * 0x9E3779B9) & _LOW
        m = ((seed >> 32) + turn * 0xBB67AE85) & _LOW
        left, right = a * 0xD2511F53, c * 0xCD9E8D57  # modulo 2^64: a mask recovers the upper word
        a, b, c, d = (
            (right >> 32 & _LOW) ^ b ^ k,
            right & _LOW,
            (left >> 32 & _LOW) ^ d ^ m,
            left & _LOW,
        )
    return torch.stack((a, b, c, d), dim=-1)
