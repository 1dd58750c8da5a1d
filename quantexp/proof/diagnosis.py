"""What an operand is in place of what it must be: a diagnosis after a mismatch, which decides nothing and may be slow.

The operand is compared with the images of its source under other axes, rules, roundings, blocks and formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats import FORMATS, Hadamard, QuantSpec, Rounding, ScaleRule, resolve
from quantexp.formats.spec import PRE_SCALE
from quantexp.formats.types import Family
from quantexp.proof.image import image, num_differing

_BLOCKS = (8, 16, 32, 64, 128)


def instead(x: Tensor, source: Tensor, spec: QuantSpec, axis: int) -> str:
    """What an operand is, in words that follow a semicolon; empty if it is nothing that is tried.

    Args:
        x: the operand, in its source's layout.
        source: the tensor before quantisation; of a part of an operand in float32.
        spec: its declaration.
        axis: the dimension that its blocks should run along.
    """
    if spec.fmt.family is Family.PYTHON or x.shape != source.shape:
        return ""
    for words, other, along in _others(spec, axis, x.dim()):
        if x.dtype != source.dtype:
            is_other = torch.equal(image(source, other, along).to(x.dtype), x)
        else:
            is_other = not num_differing(x, source, other, along)
        if is_other:
            return f"; it is {words}"
    return ""


def _others(spec: QuantSpec, axis: int, num_dims: int) -> Iterator[tuple[str, QuantSpec, int]]:
    """Other specifications and axes, with what an operand under them is."""
    plain = replace(spec, hadamard=Hadamard.NONE)
    if spec.rounding is Rounding.STOCHASTIC:
        plain = replace(plain, rounding=Rounding.EVEN)
    name = spec.fmt.name
    if plain != spec:
        yield f"{name} rounded to nearest, or not transformed", plain, axis
    if spec.quantised:
        axes = [dim for dim in range(num_dims) if dim != axis % num_dims]
        yield from (("quantised along another axis", plain, dim) for dim in axes)
        for rule in ScaleRule:
            yield f"{name} under the scale rule {rule.value}", replace(plain, scale_rule=rule), axis
        for rounding in (Rounding.EVEN, Rounding.AWAY):
            other = replace(plain, rounding=rounding)
            yield f"{name} with ties rounded {rounding.value}", other, axis
        yield f"{name} rounded towards zero", replace(plain, rounding=Rounding.ZERO), axis
        if spec.fmt.block is not None:
            for block in _BLOCKS:
                yield f"{name} in blocks of {block}", replace(plain, block=block), axis
        part = 1.0 if spec.is_pre_scaled else PRE_SCALE
        words = "without a factor" if spec.is_pre_scaled else "scaled by 3/4"
        yield f"{name} {words}", replace(plain, pre_scale=part), axis
    for fmt in FORMATS.values():
        rules: list[ScaleRule | None] = [*ScaleRule] if fmt.family is Family.MX else [None]
        if fmt.name != name:
            yield from ((fmt.name, resolve(fmt, scale_rule=rule), axis) for rule in rules)
