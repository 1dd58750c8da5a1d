"""What others do of quantising, for comparisons by turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantexp.formats.families import SCALED_VALUES, quantise_flat, quantise_mx
from quantexp.formats.kernels import torch_alone
from quantexp.formats.layout import outer_axis_inner
from quantexp.formats.quantising import quantise, quantise_by_torch
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Family


def torchao_round_trip(fmt: str, scale_rule: str) -> Callable[[Tensor], Tensor]:
    """Blocks of 32 by torchao along the last axis of `mxfp8` or `mxfp4`, to codes and back to x's dtype."""
    from quantexp.extras.verify.oracles.torchao_oracle import (  # type: ignore[attr-defined]
        TYPES,
        ScaleCalculationMode,
        mx_tensor,
    )

    element = TYPES[{"mxfp8": "mxfp8_e4m3", "mxfp4": "mxfp4_e2m1"}[fmt]]
    mode: Any = ScaleCalculationMode(scale_rule)

    def there_and_back(x: Tensor) -> Tensor:
        scales, codes = mx_tensor.to_mx(x, element, 32, mode)
        restored: Tensor = mx_tensor.to_dtype(codes, scales, element, 32, x.dtype)
        return restored

    return there_and_back


def by_torch(x: Tensor, y: Tensor, spec: QuantSpec, axis: int, scale: Tensor | None) -> None:
    """Write the quantised x to y by torch's own code, whichever kernels there are."""
    if spec.fmt.family is Family.MX:
        extents = outer_axis_inner(x.shape, axis)
        quantise_mx(x.view(extents), y.view(extents), spec)
    elif spec.fmt.family in SCALED_VALUES:
        quantise_flat(x.view(-1), y.view(-1), spec, scale)
    elif spec.fmt.across == 1:
        quantise_by_torch(x, y, spec, axis, scale, None)
    else:
        with torch_alone():
            quantise(x, spec, axis=axis, out=y)


def by_compiled_torch(
    spec: QuantSpec, axis: int
) -> Callable[[Tensor, Tensor, Tensor | None], None]:
    """The same through `torch.compile`."""

    def quantise_plainly(x: Tensor, y: Tensor, scale: Tensor | None) -> None:
        by_torch(x, y, spec, axis, scale)

    compiled: Callable[[Tensor, Tensor, Tensor | None], None] = torch.compile(quantise_plainly)
    return compiled
