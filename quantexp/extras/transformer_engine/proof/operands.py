"""Judges one operand of a product that Transformer Engine computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quantexp.extras.transformer_engine.proof.conformity import finding_of, other_shape
from quantexp.extras.transformer_engine.proof.stored import read
from quantexp.formats import QuantSpec
from quantexp.proof.diagnosis import instead
from quantexp.proof.expected import num_unequal
from quantexp.proof.findings import Finding, Status
from quantexp.proof.verdict import compared


def judge_operand(x: Any, spec: QuantSpec, axis: int, source: Tensor) -> Finding:
    """Compare an operand with its declaration and with the tensor that it was quantised from.

    Args:
        x: the operand, stored by Transformer Engine, or plain.
        spec: its declaration.
        axis: the dimension of the matrix [M, K] that the product reduces, -1 or 0.
        source: the matrix before quantisation, gathered as x was.
    """
    try:
        stored = read(x, axis)
    except ValueError as error:
        return Finding(Status.MISMATCH, f"{error}, which its product needs", quantised=True)
    if stored is not None:
        return finding_of(stored, spec, source)
    if spec.quantised:
        return Finding(
            Status.MISMATCH, f"it reached the product in {str(x.dtype).removeprefix('torch.')}"
        )
    matrix = x.detach().reshape(-1, x.shape[-1])
    if matrix.shape != source.shape:
        return other_shape(matrix, source)
    return compared(matrix, source, spec, axis, num_unequal(matrix, source), instead)
