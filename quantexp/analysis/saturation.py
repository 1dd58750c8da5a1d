"""The largest magnitude a format can represent at the scale that quantisation really chose.

It is max 2^s for an MX block whose stored scale is s, 32768 / s for a HiF8 tensor that is
multiplied with s, and the largest finite value for bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import Family, Format, ScaleRule, encode, finite_amax, quantise, resolve

#: By definition amax <= max 2^s under these.
_NEVER_SATURATES = frozenset({ScaleRule.RCEIL, ScaleRule.CEIL})
_E8M0_BIAS = 127


def largest_representable(
    x: Tensor, fmt: Format, axis: int, options: Mapping[str, Any]
) -> Tensor | None:
    """The limit of each element, float32, of a shape that expands to x's.

    None where nothing can saturate (rceil and ceil); meaningless in a block with NaN or Inf.

    Raises:
        ValueError: an option that the format does not have.
    """
    match fmt.family:
        case Family.MX:
            return _block_limits(x, fmt, axis, options)
        case Family.HIF8:
            return _hif8_limit(x, fmt, options)
        case Family.BF16:
            return torch.tensor(fmt.element.max, dtype=torch.float32)


def _block_limits(x: Tensor, fmt: Format, axis: int, options: Mapping[str, Any]) -> Tensor | None:
    resolved = resolve(fmt, **options)
    if resolved.scale_rule in _NEVER_SATURATES or x.numel() == 0:
        return None
    _, scales = encode(x if x.ndim else x.reshape(1), fmt, axis=axis, **options)
    largest = torch.full(scales.shape, fmt.element.max)
    limits = torch.ldexp(largest, scales.to(torch.int32) - _E8M0_BIAS)
    spread = limits.repeat_interleave(resolved.block, dim=axis)
    return spread.narrow(axis, 0, x.shape[axis]) if x.ndim else spread[0]


def _hif8_limit(x: Tensor, fmt: Format, options: Mapping[str, Any]) -> Tensor:
    """What infinity becomes when it saturates at this tensor's scale."""
    scaled = options.get("scaling") not in (None, "none")
    amax = {"amax": options.get("amax", finite_amax(x))} if scaled else {}
    infinity = torch.tensor(math.inf, dtype=torch.float32)
    return quantise(infinity, fmt, **{**options, **amax, "saturate": True})
