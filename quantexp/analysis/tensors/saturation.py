"""The largest magnitude that a format represents at the actual scale of the quantisation.

It is max 2^s for an MX block whose stored scale is s, max b t for an NVFP4 block of scale b in a
tensor of scale t, max / s for an FP8 or HiF8 tensor that is multiplied with s, and the largest
finite value for bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import (
    Family,
    Format,
    Options,
    ScaleRule,
    Scaling,
    TwoLevelScales,
    decode,
    encode,
    finite_amax,
    quantise,
    resolve,
)
from quantexp.formats.codes import code_values

#: Scale rules with amax <= max 2^s by definition.
_NEVER_SATURATES = frozenset({ScaleRule.RCEIL, ScaleRule.CEIL})


def largest_representable(
    x: Tensor, fmt: Format, axis: int, options: Mapping[str, Any]
) -> Tensor | None:
    """The limit of each element, float32, of a shape that expands to x's.

    None where nothing can saturate (rceil and ceil); meaningless in a block with NaN or Inf.

    Raises:
        ValueError: an option that the format does not have.
    """
    match fmt.family:
        case Family.MX | Family.NV:
            return _block_limits(x, fmt, axis, options)
        case Family.HIF8 | Family.FP8:
            return _flat_limit(x, fmt, options)
        case Family.BF16:
            return torch.tensor(fmt.element.max, dtype=torch.float32)


def _block_limits(x: Tensor, fmt: Format, axis: int, options: Mapping[str, Any]) -> Tensor | None:
    resolved = _resolved(fmt, options)
    never = fmt.family is Family.MX and resolved.scale_rule in _NEVER_SATURATES
    if never or x.numel() == 0:
        return None
    _, scales = encode(x if x.ndim else x.reshape(1), fmt, axis=axis, **options)
    blocks = scales.block if isinstance(scales, TwoLevelScales) else scales
    largest = torch.full_like(blocks, code_values(fmt.element).index(fmt.element.max))
    limits = decode(largest, scales, fmt, axis=axis, block=1)
    spread = limits.repeat_interleave(resolved.block, dim=axis)
    return spread.narrow(axis, 0, x.shape[axis]) if x.ndim else spread[0]


def _flat_limit(x: Tensor, fmt: Format, options: Mapping[str, Any]) -> Tensor:
    """The value of a saturated infinity at this tensor's scale."""
    scaled = _resolved(fmt, options).scaling is not Scaling.NONE
    amax = {"amax": options.get("amax", finite_amax(x))} if scaled else {}
    infinity = torch.tensor(math.inf, dtype=torch.float32)
    return quantise(infinity, fmt, **{**options, **amax, "saturate": True})


def _resolved(fmt: Format, options: Mapping[str, Any]) -> Options:
    known = {name: value for name, value in options.items() if name != "amax"}
    return resolve(fmt, **known, has_amax="amax" in options)
