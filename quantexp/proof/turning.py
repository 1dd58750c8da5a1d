"""Gradients that come in the domain of a Hadamard transform, and are transformed back before they leave a linear layer.

    dx = d H, d = g w_h      dw = d H, d = g^T x_h      along the input width

for a forward copy w_h or x_h that the product multiplies, or quantises again. H is symmetric, and 2^-ceil(k/2) or
2^-floor(k/2) times its signs: the other one than in the forward product, so that both give the identity. An
implementation rounds d to the dtype, adds in k steps of float32, and rounds the result.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats import QuantSpec
from quantexp.proof.products import LAMBDA, Reference, unit


def turned_back(
    expected: Reference, columns: Tensor, copy: QuantSpec, dtype: torch.dtype
) -> Reference:
    """A product of a dtype after its transform along the columns is undone; `columns` are those of whole blocks."""
    matrix = _walsh(columns, copy.hadamard_block, left=not copy.left)
    magnitude = matrix.abs()
    rounded = expected.rounded @ magnitude
    smallest = torch.finfo(dtype).smallest_normal * unit(dtype)
    steps = copy.hadamard_block.bit_length() - 1
    return replace(
        expected.again(),
        values=expected.values @ matrix,
        rounded=rounded,
        sums=expected.summed @ magnitude + rounded * (steps / LAMBDA),
        flushed=(expected.flushed + smallest) * float(magnitude.sum(0).max()),
        largest=expected.rounded.amax(),
    )


def _walsh(columns: Tensor, block: int, *, left: bool) -> Tensor:
    """The transform of columns in blocks, float64; a short last block is powers of two, the largest first."""
    number = torch.arange(len(columns), device=columns.device)
    matrix = torch.zeros(len(columns), len(columns), dtype=torch.float64, device=columns.device)
    for of_block in torch.unique(columns // block):
        own = number[columns // block == of_block]
        while len(own):
            k = len(own).bit_length() - 1
            piece, own = own[: 1 << k], own[1 << k :]
            inside = torch.arange(1 << k, device=columns.device)
            common = inside[:, None] & inside
            odd = torch.zeros_like(common)
            for bit in range(k):
                odd ^= (common >> bit) & 1
            scale = 2.0 ** -((k + 1) // 2 if left else k // 2)
            matrix[piece[:, None], piece] = (1.0 - 2.0 * odd.double()) * scale
    return matrix
