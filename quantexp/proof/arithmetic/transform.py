"""The Walsh-Hadamard transform by stages of constant geometry (Pease, J. ACM 15, 1968).

Each stage adds and subtracts the neighbours 2i and 2i + 1, and writes the sum to i and the difference to i + n/2. After
log2 n stages the order is the natural one again. The operands of every float32 addition, and their order, are those of
the definition (see `quantexp.formats.transform`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.kernels import exact_in_pool
from quantexp.formats.spec import QuantSpec
from quantexp.proof.arithmetic.layout import chunks, extents


def transformed(x: Tensor, spec: QuantSpec, axis: int, signs: Tensor | None) -> Tensor:
    """x after its transform along `axis`, float32; x itself without one.

    A short last block consists of powers of two, the largest first.
    """
    return _transformed(x, spec, axis, signs) if spec.is_transformed else x.detach()


@exact_in_pool
def _transformed(x: Tensor, spec: QuantSpec, axis: int, signs: Tensor | None) -> Tensor:
    shape, block = extents(x.shape, axis), spec.hadamard_block
    x_ONI = x.detach().contiguous().view(shape)
    y_ONI = torch.empty(shape, dtype=torch.float32, device=x.device)
    start, size = 0, block
    while start < shape[1]:
        while size > shape[1] - start:
            size //= 2
        stop = start + (shape[1] - start) // size * size
        x_OBKI, y_OBKI = (
            torch.unflatten(part[:, start:stop], 1, (-1, size)) for part in (x_ONI, y_ONI)
        )
        place = start % block
        signs_K = None if signs is None else signs[place : place + size].view(-1, 1, 1, 1)
        for at in chunks(x_OBKI):
            v_KOBI = x_OBKI[at].movedim(2, 0).float()
            v_KOBI = v_KOBI if signs_K is None else v_KOBI * signs_K
            y_OBKI[at] = _walsh(v_KOBI, spec.left).movedim(0, 2)
        start = stop
    return y_ONI.view(x.shape)


def _walsh(v_KOBI: Tensor, left: bool) -> Tensor:
    """H times blocks of 2^k elements, and 2^-ceil(k/2) of a product's left operand, 2^-floor(k/2) of its right."""
    k = v_KOBI.shape[0].bit_length() - 1
    for _ in range(k):
        even, odd = v_KOBI[0::2], v_KOBI[1::2]
        v_KOBI = torch.cat((even + odd, even - odd))
    return v_KOBI * 2.0 ** -((k + 1) // 2 if left else k // 2)
