"""A format in Python, as a user would write one (docs/own_format.md)."""

from __future__ import annotations

import torch
from torch import Tensor


class Ternary:
    """-s, 0 and s along the axis, s the largest magnitude, rounded stochastically."""

    def quantise(self, x: Tensor, *, axis: int, generator: torch.Generator) -> Tensor:
        scale = x.abs().float().amax(dim=axis, keepdim=True).clamp_min(1e-30)
        draw = torch.rand(x.shape, generator=generator, device=x.device)
        return ((x / scale + draw).floor().clamp(-1, 1) * scale).to(x.dtype)

    def contains(self, x: Tensor, axis: int) -> Tensor:
        largest = x.abs().amax(dim=axis, keepdim=True)
        return (x == 0) | (x.abs() == largest)
