"""The largest magnitude that a format represents at the actual scale of the quantisation.

It is max 2^s for an MX block whose stored scale is s, max b t for an NVFP4 block of scale b in a
tensor of scale t, max / s for an FP8 or HiF8 tensor that is multiplied with s, and the largest
finite value for bf16.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats import (
    Family,
    QuantSpec,
    ScaleRule,
    TwoLevelScales,
    decode,
    finite_amax,
    quantise,
    resolve,
    scales_of,
)
from quantexp.formats.codes import code_values
from quantexp.formats.spec import AnySpec

#: Scale rules with amax <= max 2^s by definition.
_NEVER_SATURATES = frozenset({ScaleRule.RCEIL, ScaleRule.CEIL})


def largest_representable(
    x: Tensor, fmt: AnySpec, axis: int, amax: Tensor | None = None
) -> Tensor | None:
    """The limit of each element, float32, of a shape that expands to x's.

    `amax` is that of the call of `quantise`. None where nothing can saturate (rceil and ceil); meaningless in a block
    with NaN or Inf.

    Raises:
        ValueError: as for `quantise`.
    """
    spec = resolve(fmt)
    match spec.fmt.family:
        case Family.MX | Family.NV:
            return _block_limits(x, spec, axis, amax)
        case Family.HIF8 | Family.FP8:
            return _flat_limit(x, spec, amax)
        case Family.BF16:
            return torch.tensor(spec.fmt.element.max, dtype=torch.float32)


def _block_limits(x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None) -> Tensor | None:
    never = spec.fmt.family is Family.MX and spec.scale_rule in _NEVER_SATURATES
    if never or x.numel() == 0:
        return None
    scales = scales_of(x if x.ndim else x.reshape(1), spec, axis=axis, amax=amax)
    blocks = scales.block if isinstance(scales, TwoLevelScales) else scales
    largest = torch.full_like(blocks, code_values(spec.fmt.element).index(spec.fmt.element.max))
    limits = decode(largest, scales, spec.fmt, axis=axis, block=1)
    spread = limits.repeat_interleave(spec.block, dim=axis)
    return spread.narrow(axis, 0, x.shape[axis]) if x.ndim else spread[0]


def _flat_limit(x: Tensor, spec: QuantSpec, amax: Tensor | None) -> Tensor:
    """The value of a saturated infinity at this tensor's scale."""
    if spec.is_scaled and amax is None:
        amax = finite_amax(x)
    saturating = replace(spec, saturate=True, rounding=spec.fmt.rounding)
    return quantise(torch.tensor(math.inf, dtype=torch.float32), saturating, amax=amax)
