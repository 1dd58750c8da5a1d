"""The sample of a declared operand to quantise: complete blocks, transformed if required, with its options.

The amax of a tensor scale is that of the whole tensor; after a Hadamard transform that of the blocks that are looked
at, under delayed scaling the one that was handed over.
"""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

from quantexp.analysis.tensors.operands import DeclaredOperand
from quantexp.analysis.tensors.rows import laid_out, padding_of_transform
from quantexp.analysis.tensors.sample import SAMPLE_ELEMENTS, OperandSample, sample_blocks
from quantexp.formats import Family, finite_amax, hadamard

_MX_BLOCK = 32


def rounded_part(
    tensor: Tensor, declared: DeclaredOperand, amax: Tensor | None, limit: int = SAMPLE_ELEMENTS
) -> OperandSample:
    """About `limit` elements of a tensor at most, in complete blocks; `amax` is the whole tensor's.

    Without a limit (0) it is the whole tensor, as where blocks have several rows, and for a class in Python. Where
    blocks are along tokens, an expert's rows lie by sequence.

    Raises:
        CaptureError: an expert's tensor of other rows than the manifest says.
    """
    spec = declared.spec
    whole = lcm(_MX_BLOCK if spec.fmt.block is None else spec.block, spec.hadamard_block)
    limit = 0 if spec.fmt.across > 1 or spec.fmt.family is Family.PYTHON else limit
    padding = None
    if declared.rows is not None and declared.dim == 0:
        laid = laid_out(tensor, declared.rows)
        tensor = laid.x
        padding, _ = sample_blocks(laid.padding, 0, whole, limit or max(1, tensor.numel()))
    part, dim = sample_blocks(tensor, declared.dim, whole, limit or max(1, tensor.numel()))
    if spec.is_transformed:
        part = _transformed(part, declared, dim)
        amax = finite_amax(part)
        if padding is not None:
            padding = padding_of_transform(padding, dim, spec.hadamard_block)
    if declared.amax is not None:
        amax = torch.tensor(declared.amax)
    return OperandSample(part, dim, amax if spec.is_scaled else None, padding)


def _transformed(part: Tensor, declared: DeclaredOperand, dim: int) -> Tensor:
    """The transformed tensor: the quantisation error is the same before and after the inverse transform."""
    spec, signs = declared.spec, None
    if declared.signs is not None:
        signs = torch.tensor(declared.signs, dtype=torch.float32)
    return hadamard(part, axis=dim, block=spec.hadamard_block, signs=signs, left=spec.left)
