"""Scores every candidate for one operand: SQNR, underflow and saturation.

Operands are quantised as in training, by the candidate's own `QuantSpec` (`quantise_operand`): transformed in
float32 where there is a Hadamard transform, rounded, and put in the tensor's dtype. After a transform the error is that
of the transform, as large in proportion as what is left after undoing it. Random numbers are those of seed 0, and so
are random signs: a capture has no moment of its own. The amax of a tensor scale is that of the whole tensor, after a
transform that of the sampled blocks.

What several candidates share is computed once: transforms, the random numbers of stochastic rounding, and the saturated
elements, which do not depend on the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantexp.analysis.tensors.operands import padding_of_transform
from quantexp.analysis.tensors.sample import OperandSample
from quantexp.capture.statistics.errors import Fidelity, beyond_largest, fidelity
from quantexp.extras.requantise.candidates import Candidate, Transform
from quantexp.formats import (
    Family,
    Hadamard,
    QuantSpec,
    Rounding,
    finite_amax,
    hadamard,
    quantise,
    random_signs,
)
from quantexp.formats.families import tensor_scale
from quantexp.formats.philox import random_numbers
from quantexp.formats.quantising import quantise_dense
from quantexp.quant.sites import Operand, Slot
from quantexp.quant.step_state import Draw

_SEED = 0
#: The fidelity of blocks of several rows, which are for weights, for any other operand.
NOT_FOR_IT = Fidelity(math.nan, math.nan, math.nan)


def scores(
    sample: OperandSample, slot: Slot, candidates: Sequence[Candidate]
) -> Iterator[Fidelity]:
    """The fidelity of each candidate, in order."""
    shared = _Shared(sample, slot)
    for candidate in candidates:
        yield shared.fidelity(candidate)


class _Shared:
    """The shared data of the candidates for one operand."""

    def __init__(self, sample: OperandSample, slot: Slot) -> None:
        self._sample, self._slot = sample, slot
        self._transforms: dict[Transform, tuple[Tensor, Tensor | None]] = {}
        self._saturated: dict[Candidate, Tensor | None] = {}
        self._random: Tensor | None = None

    def fidelity(self, candidate: Candidate) -> Fidelity:
        """The quantised operand, or its quantised transform."""
        if candidate.format.across > 1 and self._slot.operand is not Operand.W:
            return NOT_FOR_IT
        v, amax = self._transformed(candidate)
        spec = candidate.spec(self._slot)
        amax = amax if spec.is_scaled else None
        q = self._rounded(v, spec, amax).to(self._sample.x.dtype)
        if spec.is_pre_scaled:
            q = q.float() / spec.pre_scale
        beyond = self._beyond_largest(v, candidate, spec, amax)
        return fidelity(v, q, beyond, self._padding(candidate))

    def _padding(self, candidate: Candidate) -> Tensor | None:
        padding, block = self._sample.padding, candidate.hadamard_block
        if padding is None or block is None:
            return padding
        return padding_of_transform(padding, self._sample.dim, block)

    def _transformed(self, candidate: Candidate) -> tuple[Tensor, Tensor | None]:
        """The tensor to quantise, contiguous, and its amax."""
        key = candidate.transform
        if key not in self._transforms:
            x, block = self._sample.x.contiguous(), candidate.hadamard_block
            if block is None:
                self._transforms[key] = x, self._sample.amax
            else:
                random = candidate.hadamard is Hadamard.RANDOM
                signs = random_signs(block, _SEED, 0, x.device) if random else None
                v = hadamard(
                    x, axis=self._sample.dim, block=block, signs=signs, left=self._slot.is_left
                )
                self._transforms[key] = v, finite_amax(v)
        return self._transforms[key]

    def _rounded(self, v: Tensor, spec: QuantSpec, amax: Tensor | None) -> Tensor:
        if spec.fmt.family is Family.PYTHON:
            return quantise(v, spec, axis=self._sample.dim, seed=_SEED)
        draws = spec.rounding is Rounding.STOCHASTIC
        if draws and self._random is None:
            self._random = random_numbers(v, spec, _SEED)
        if spec.fmt.across > 1:
            draw = Draw(seed=_SEED) if draws else Draw()
            return quantise(v, spec, axis=self._sample.dim, amax=amax, **draw)
        y = torch.empty_like(v)
        scale = tensor_scale(v, spec, amax)
        random = self._random if draws else None
        quantise_dense(v, y, spec, self._sample.dim % v.ndim, scale, random)
        return y

    def _beyond_largest(
        self, v: Tensor, candidate: Candidate, spec: QuantSpec, amax: Tensor | None
    ) -> Tensor | None:
        usual = replace(candidate, rounding=candidate.format.rounding)
        if usual not in self._saturated:
            self._saturated[usual] = beyond_largest(v, spec, self._sample.dim, amax)
        return self._saturated[usual]
