"""Random numbers by position: a pure function of seed, offset and index, identical on every device.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) computes four
32-bit words from a 128-bit counter and a 64-bit key in ten rounds of integer arithmetic. Here

    key      the seed                           counter   index // 4 in the low half, the offset in the high half
    word     index % 4 of the four              bits      the upper 24 of a word

so an element's number does not depend on how a tensor is split or stored. 64-bit integers hold the products of 32-bit
words; they wrap, and a mask extracts the upper half of the wrapped value. On a CPU with a compiler, compiled code
computes the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quantexp.compiled import address
from quantexp.formats.kernels import cpu
from quantexp.formats.layout import Place
from quantexp.formats.rounding import RANDOM_BITS
from quantexp.formats.spec import QuantSpec, check_draw
from quantexp.formats.types import Rounding

_WORD = 32
_MASK = (1 << _WORD) - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
#: Counters per chunk: their words fit in a core's L2 cache.
_CHUNK = 1 << 14
#: On other devices a chunk only limits the memory of the temporaries, about 80 bytes a counter.
_DEVICE_CHUNK = 1 << 22

#: An int or an int64 tensor, in [0, 2^32).
Word = int | Tensor
Words = tuple[Word, Word, Word, Word]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """The four output words of Philox4x32-10 for a counter of four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _product(a: int, b: Word) -> tuple[Word, Word]:
    """The upper and lower half of a product of two words."""
    product = a * b
    return (product >> _WORD) & _MASK, product & _MASK


def random_integers(count: int, seed: int, offset: int, device: torch.device) -> Tensor:
    """The first `count` random numbers of a seed and an offset: integers in [0, 2^24) as float32.

    Seed and offset lie in [0, 2^64).
    """
    first = torch.zeros(1, dtype=torch.int64, device=device)
    return _from(first, count, seed, offset).view(-1)


def random_integers_at(
    place: Place, shape: Sequence[int], seed: int, offset: int, device: torch.device
) -> Tensor:
    """The random numbers of a part, in its shape: those of its elements in the whole tensor.

    Raises:
        ValueError: the part does not lie in the whole.
    """
    return _from(place.row_starts(shape, device), shape[-1], seed, offset).view(*shape)


def _from(first: Tensor, extent: int, seed: int, offset: int) -> Tensor:
    """Rows of so many numbers, each from its position on: float32 [rows, extent]."""
    device = first.device
    numbers = torch.empty(len(first), extent, dtype=torch.float32, device=device)
    if _draws(first):
        _draw(numbers, first, seed, offset)
        return numbers
    chunk = _chunk(device)
    width = min(extent, 4 * chunk)
    rows = max(1, 4 * chunk // max(width, 1))
    # A part may begin at any of the four words of its first counter.
    counters = torch.arange(-(-(width + 3) // 4), device=device)
    for row in range(0, len(first), rows):
        for start in range(0, extent, max(width, 1)):
            part = numbers[row : row + rows, start : start + width]
            begins = first[row : row + rows, None] + start
            words = _words(begins // 4 + counters, seed, offset).flatten(1)
            part.copy_(words.gather(1, begins % 4 + torch.arange(part.shape[1], device=device)))
    return numbers


def _chunk(device: torch.device) -> int:
    """The number of counters per chunk."""
    return _CHUNK * torch.get_num_threads() if device.type == "cpu" else _DEVICE_CHUNK


def _words(index: Tensor, seed: int, offset: int) -> Tensor:
    """The four numbers of each counter, float32 [..., 4], by torch."""
    key = (seed & _MASK, seed >> _WORD)
    above = (offset & _MASK, offset >> _WORD)
    numbers = torch.empty(*index.shape, 4, dtype=torch.float32, device=index.device)
    for place, word in enumerate(philox4x32((index & _MASK, index >> _WORD, *above), key)):
        assert isinstance(word, Tensor)
        numbers[..., place] = word >> (_WORD - RANDOM_BITS)
    return numbers


def random_numbers(
    x: Tensor,
    spec: QuantSpec,
    seed: int | None,
    offset: int | None = None,
    place: Place | None = None,
) -> Tensor | None:
    """A random number for each element of x, in its shape; None unless rounding is stochastic.

    Raises:
        ValueError: seed and offset as in `check_draw`; or x does not lie at `place`.
    """
    check_draw(spec, seed, offset)
    if spec.rounding is not Rounding.STOCHASTIC:
        return None
    assert seed is not None, "checked"
    if place is not None:
        return random_integers_at(place, x.shape, seed, offset or 0, x.device)
    return random_integers(x.numel(), seed, offset or 0, x.device).view(x.shape)


class _Draw(ctypes.Structure):
    _fields_ = (
        *cpu.fields(ctypes.c_void_p, "starts numbers"),
        *cpu.fields(ctypes.c_int64, "rows extent"),
        *cpu.fields(ctypes.c_uint64, "seed offset"),
        *cpu.fields(ctypes.c_int64, "next"),
    )


def _draws(starts: Tensor) -> bool:
    """Whether compiled code accepts these positions."""
    is_real = type(starts) is Tensor and not torch.compiler.is_compiling()
    return is_real and starts.device.type == "cpu" and cpu.functions() is not None


def _draw(numbers: Tensor, starts: Tensor, seed: int, offset: int) -> None:
    """Write random numbers, float32 [rows, extent], each row from its position `starts` [rows], int64, on."""
    compiled = cpu.functions()
    assert compiled is not None, "claimed"
    rows, extent = numbers.shape
    job = _Draw(
        address(starts, rows, torch.int64),
        address(numbers, rows * extent, torch.float32),
        *(rows, extent, seed, offset),
    )
    if numbers.numel():
        compiled.random_numbers(ctypes.byref(job), torch.get_num_threads())
