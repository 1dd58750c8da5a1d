"""The sample of a declared operand to quantise: complete blocks, transformed if required, with its options.

The amax of a tensor scale is that of the whole tensor; after a Hadamard transform that of the blocks that are looked
at, under delayed scaling the one that was handed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantexp.analysis.tensors.operands import DeclaredOperand
from quantexp.analysis.tensors.rows import laid_out, padding_of_transform
from quantexp.analysis.tensors.sample import SAMPLE_ELEMENTS, sample_blocks
from quantexp.formats import finite_amax, hadamard

_MX_BLOCK = 32


@dataclass(frozen=True)
class Rounded:
    """A sample of an operand, ready to be quantised."""

    x: Tensor
    #: The dimension of the blocks in x.
    dim: int
    #: All arguments of `quantise`.
    options: dict[str, Any]
    #: The padding elements of x; None without padding.
    padding: Tensor | None = None

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return self.x.numel() - (0 if self.padding is None else int(self.padding.sum()))


def rounded_part(
    tensor: Tensor, declared: DeclaredOperand, amax: Tensor | None, limit: int = SAMPLE_ELEMENTS
) -> Rounded:
    """About `limit` elements of a tensor at most, in complete blocks; `amax` is the whole tensor's.

    Without a limit (0) it is the whole tensor. An expert's rows lie by sequence where blocks are along tokens.

    Raises:
        CaptureError: an expert's tensor of other rows than the manifest says.
    """
    block = int(declared.options.get("block") or declared.format.block or _MX_BLOCK)
    whole = max(block, declared.hadamard_block or 1)
    padding = None
    if declared.rows is not None and declared.dim == 0:
        laid = laid_out(tensor, declared.rows)
        tensor = laid.x
        padding, _ = sample_blocks(laid.padding, 0, whole, limit or max(1, tensor.numel()))
    part, dim = sample_blocks(tensor, declared.dim, whole, limit or max(1, tensor.numel()))
    if declared.hadamard_block is not None:
        part = _transformed(part, declared, dim)
        amax = finite_amax(part)
        if padding is not None:
            padding = padding_of_transform(padding, dim, declared.hadamard_block)
    if declared.amax is not None:
        amax = torch.tensor(declared.amax)
    scaled = {"amax": amax} if is_scaled(declared) else {}
    return Rounded(part, dim, {**declared.options, **scaled}, padding)


def is_scaled(declared: DeclaredOperand) -> bool:
    """Whether the operand has a per-tensor scale."""
    return declared.options.get("scaling") not in (None, "none")


def _transformed(part: Tensor, declared: DeclaredOperand, dim: int) -> Tensor:
    """The transformed tensor: the quantisation error is the same before and after the inverse transform."""
    assert declared.hadamard_block is not None
    signs = None if declared.signs is None else torch.tensor(declared.signs, dtype=torch.float32)
    return hadamard(part, axis=dim, block=declared.hadamard_block, signs=signs, left=declared.left)
