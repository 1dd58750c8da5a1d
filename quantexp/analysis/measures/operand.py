"""One operand under one format: quantisation error, exponents of the actual scales, and used codes.

A value is its code times a scale; the exponent of the scale is

    MX            s of the block's 2^s                                        one a block
    nvfp4         floor(log2 b t), b the block's scale, t the tensor's        one a block
    fp8, hifp8    -log2 m, rounded down, m what the tensor is multiplied by   one a tensor

A scale of a format in Python is not known. Blocks of zeros have no exponent and are counted apart, as are blocks with
NaN or Inf, of which nothing is judged.

What is quantised in place of an operand is a sample of complete blocks, transformed if required, with its options. The
amax of a tensor scale is that of the whole tensor; after a Hadamard transform that of the sampled blocks, under delayed
scaling the one that was handed over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from math import lcm

import torch
from torch import Tensor

from quantexp.analysis.measures.hif8 import code_counts
from quantexp.analysis.tensors.operands import (
    DeclaredOperand,
    laid_out,
    num_blocks_of_padding,
    padding_of_transform,
)
from quantexp.analysis.tensors.sample import OperandSample, sample_blocks
from quantexp.capture.statistics.counts import Counts, of_exponents
from quantexp.capture.statistics.errors import Fidelity, quantisation_error
from quantexp.capture.statistics.fidelity import E8M0_BIAS, blocks_by_exponent
from quantexp.formats import Family, finite_amax, hadamard, scales_of

_MX_BLOCK = 32


class Axis(StrEnum):
    """The axis of the blocks."""

    #: The last dimension: input width of x and w, output width of g, head_dim, keys.
    ROWS = "rows"
    #: The other dimension of the matrix: tokens, the output width of w, queries.
    COLUMNS = "columns"
    #: No blocks.
    TENSOR = "tensor"


@dataclass(frozen=True)
class UnderFormat:
    """The results for an operand in a format."""

    #: `fprop.x`; empty for an axis that no product reduces over in this format, for comparison.
    slot: str
    #: `mxfp4_e2m1 floor`, see `DeclaredOperand.name`.
    format: str
    axis: Axis
    #: Whether the run declares this format; otherwise the format was requested.
    declared: bool
    #: The number of sampled elements.
    num_elements: int
    fidelity: Fidelity
    #: The scale exponents of the blocks, or of the tensor.
    scale_exponents: Counts
    #: The numbers of zero blocks, and of blocks with NaN or Inf.
    zero_blocks: int = 0
    nan_blocks: int = 0
    #: hifp8: the number of values by exponent after scaling, without zeros (`quantexp.analysis.measures.hif8`).
    code_exponents: Counts | None = None


def axis_of(declared: DeclaredOperand) -> Axis:
    """The axis of the operand's blocks."""
    if declared.format.block is None:
        return Axis.TENSOR
    return Axis.ROWS if declared.dim == -1 else Axis.COLUMNS


def under_format(
    x: Tensor,
    declared: DeclaredOperand,
    amax: Tensor,
    *,
    slot: str = "",
    is_declared: bool = True,
    limit: int = 0,
) -> UnderFormat:
    """Judge an operand on about `limit` elements in complete blocks (0: on all); `amax` is the whole tensor's."""
    part = _sample(x, declared, amax, limit)
    exponents, zero_blocks, nan_blocks = _scale_exponents(part, declared)
    is_hif8 = declared.format.family is Family.HIF8
    return UnderFormat(
        slot,
        declared.name,
        axis_of(declared),
        is_declared,
        part.num_elements,
        quantisation_error(
            part.x,
            declared.spec,
            part.dim,
            amax=part.amax,
            draw=declared.draw,
            padding=part.padding,
        ),
        exponents,
        zero_blocks,
        nan_blocks,
        code_counts(part.x, declared.spec, part.amax, declared.draw) if is_hif8 else None,
    )


def largest_scale_exponent(declared: DeclaredOperand, abs_max: float) -> int:
    """The scale exponent for a positive element that is the largest of its block and of its tensor.

    Under delayed scaling that of the amax that was handed over; before a Hadamard transform, as if there was none.
    """
    amax = None
    if declared.spec.is_scaled:
        amax = torch.tensor(abs_max if declared.amax is None else declared.amax)
    part = OperandSample(torch.tensor([abs_max]), 0, amax)
    exponents, _, _ = _scale_exponents(part, declared)
    return exponents.first


def _scale_exponents(part: OperandSample, declared: DeclaredOperand) -> tuple[Counts, int, int]:
    """The exponents, and the numbers of zero blocks and of blocks with NaN or Inf."""
    if declared.format.family in (Family.BF16, Family.PYTHON) or part.x.numel() == 0:
        return Counts(), 0, 0
    if declared.format.block is None:
        scales = scales_of(part.x, declared.spec, axis=part.dim, amax=part.amax)
        assert isinstance(scales, Tensor)
        _, exponent = math.frexp(value := float(1 / scales.double()))
        return Counts(exponent - 1, (1,)) if math.isfinite(value) else Counts(), 0, 0
    empty = 0
    if part.padding is not None:
        empty = num_blocks_of_padding(part.padding, part.dim, declared.spec.scale_block)
    blocks_E = blocks_by_exponent(part.x, declared.spec, part.dim, part.amax)
    zero, *blocks, nan = blocks_E.tolist()
    return of_exponents(blocks, 1 - E8M0_BIAS), zero - empty, nan


def _sample(
    tensor: Tensor, declared: DeclaredOperand, amax: Tensor | None, limit: int
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
