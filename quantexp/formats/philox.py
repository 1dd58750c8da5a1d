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

from collections.abc import Sequence

import torch
from torch import Tensor

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
    num_counters = -(-count // 4)
    numbers = torch.empty(num_counters, 4, dtype=torch.float32, device=device)
    chunk = _chunk(device)
    for start in range(0, num_counters, chunk):
        index = torch.arange(start, min(start + chunk, num_counters), device=device)
        _fill(numbers[start : start + chunk], index, seed, offset)
    return numbers.view(-1)[:count]


def random_integers_at(
    place: Place, shape: Sequence[int], seed: int, offset: int, device: torch.device
) -> Tensor:
    """The random numbers of a part, in its shape: those of its elements in the whole tensor.

    Raises:
        ValueError: the part does not lie in the whole.
    """
    place.check(shape)
    extent, stride = shape[-1], place.whole[-1]
    first = torch.full((1,), place.start[-1], dtype=torch.int64, device=device)
    for axis in reversed(range(len(shape) - 1)):
        along = torch.arange(shape[axis], device=device) + place.start[axis]
        first = (along[:, None] * stride + first).view(-1)
        stride *= place.whole[axis]
    # A row may begin at any of the four words of its first counter.
    num_counters = -(-(extent + 3) // 4)
    numbers = torch.empty(len(first), extent, dtype=torch.float32, device=device)
    counters = torch.arange(num_counters, device=device)
    elements = torch.arange(extent, device=device)
    rows = max(1, _chunk(device) // num_counters)
    for start in range(0, len(first), rows):
        begins = first[start : start + rows, None]
        words = torch.empty(len(begins), num_counters, 4, dtype=torch.float32, device=device)
        _fill(words, begins // 4 + counters, seed, offset)
        numbers[start : start + rows] = words.flatten(1).gather(1, begins % 4 + elements)
    return numbers.view(*shape)


def _chunk(device: torch.device) -> int:
    """The number of counters per chunk."""
    return _CHUNK * torch.get_num_threads() if device.type == "cpu" else _DEVICE_CHUNK


def _fill(numbers: Tensor, index: Tensor, seed: int, offset: int) -> None:
    """Write the four numbers of each counter to the last axis of contiguous `numbers`; `index` has all other axes."""
    if cpu.draws(index):
        cpu.draw(numbers, index, seed, offset)
        return
    key = (seed & _MASK, seed >> _WORD)
    above = (offset & _MASK, offset >> _WORD)
    for place, word in enumerate(philox4x32((index & _MASK, index >> _WORD, *above), key)):
        assert isinstance(word, Tensor)
        numbers[..., place] = word >> (_WORD - RANDOM_BITS)


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
