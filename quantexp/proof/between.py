"""The formulas between a decoder layer's modules in float64, and the gradients that they take back, with bounds.

    norm         n = x / sqrt(mean(x^2) + eps) * w
    activation   act(gate) * up, or act(x)
    rotation     t cos(a) + rot(t) sin(a), rot(t) = (-t2, t1)

An implementation rounds its result, and some numbers on the way, to the dtype: at most `roundings` times a part u of
the magnitude of what is rounded. What it computes in float32 is off by less than a sum of as many terms (`products`).

    # R tokens, W width, H heads, D head_dim
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.proof.products import Reference, largest_finite, unit

#: Below this a float32 result may be zero: exp overflows where x * sigmoid(x) is still normal.
_LOST = 2.0**-120
#: The largest sum of squares that float32 holds.
LARGEST_SQUARES = 2.0**127


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last dimension of x, [R, ..., W], with the weight w, [W]."""

    x: Tensor
    w: Tensor
    eps: float

    def forward(self) -> Reference:
        """What leaves it; a row whose squares overflow float32 bounds nothing."""
        values = self._normal()[0] * self.w.double()
        return self._reference(values, values.abs(), self.x.dtype)

    def back(self, g: Tensor) -> Reference:
        """The gradient of x for that of the result."""
        normal, inverse = self._normal()
        wg = self.w.double() * g.double()
        along = (wg * normal).mean(-1, keepdim=True)
        magnitude = wg.abs() + normal.abs() * (wg * normal).abs().mean(-1, keepdim=True)
        largest = torch.maximum(wg.abs().amax(), (magnitude * inverse).amax())
        lost = _lost(g.dtype) * largest_finite(inverse) * (1 + largest_finite(normal))
        values = inverse * (wg - normal * along)
        return self._reference(values, inverse * magnitude, g.dtype, largest, lost)

    def _normal(self) -> tuple[Tensor, Tensor]:
        x = self.x.double()
        squares = x.square()
        inverse = torch.rsqrt(squares.mean(-1, keepdim=True) + self.eps)
        inverse = inverse.masked_fill(squares.sum(-1, keepdim=True) >= LARGEST_SQUARES, math.nan)
        return x * inverse, inverse

    def _reference(
        self,
        values: Tensor,
        magnitude: Tensor,
        dtype: torch.dtype,
        largest: Tensor | float = 0.0,
        lost: float = 0.0,
    ) -> Reference:
        summed = math.sqrt(self.x.shape[-1]) * magnitude
        lost += _lost(dtype)
        return Reference(values, magnitude, summed, lost, roundings=3, largest=largest)


@dataclass(frozen=True)
class Activation:
    """A function of fc1's result y, [R, W]: of its first half times the second, or of all of it."""

    y: Tensor
    function: Callable[[Tensor], Tensor]
    is_gated: bool
    #: Added to the second half.
    offset: float = 0.0
    #: Whether y has been rounded on the way: it has a bias, or a fused kernel rounds every step.
    is_rounded: bool = False

    def forward(self, dtype: torch.dtype, factor: Tensor | None = None) -> Reference:
        """What enters fc2, with the factor of each row, [R, 1]."""
        values, gate, up = self._value(self.y.double())
        magnitude = (gate * up).abs()
        return self._reference(dtype, values, magnitude, (up,), factor)

    def back(self, g: Tensor, factor: Tensor | None = None) -> Reference:
        """The gradient of y for that of fc2's input, with the factor of each row."""
        dtype, y, g = g.dtype, self.y.double().requires_grad_(), g.double()
        with torch.enable_grad():
            value, gate, up = self._value(y)
        (values,) = torch.autograd.grad(value, y, g)
        gate, up = gate.detach(), up.detach()
        # A derivative has terms x (1 - sigmoid(x)), where 1 - sigmoid(x) is off by a last bit of 1, or zero.
        magnitude = (g * up).abs() * (1 + gate.abs().clamp_max(32))
        if self.is_gated:
            magnitude = torch.cat([magnitude, (g * gate).abs()], dim=-1)
        return self._reference(dtype, values, magnitude, (up, g), factor)

    def _value(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.is_gated:
            return self.function(y), y, torch.ones_like(y)
        gate, up = y.chunk(2, dim=-1)
        up = up + self.offset
        return self.function(gate) * up, gate, up

    def _reference(
        self,
        dtype: torch.dtype,
        values: Tensor,
        magnitude: Tensor,
        factors: tuple[Tensor, ...],
        factor: Tensor | None,
    ) -> Reference:
        largest = magnitude.amax()
        if factor is not None:
            values, magnitude = values * factor.double(), magnitude * factor.double().abs()
        lost = _lost(dtype) * (1 + sum(map(largest_finite, factors)))
        rounded = magnitude if self.is_rounded else values.abs()
        roundings = 4 + 2 * (factor is not None) + self.is_rounded
        return Reference(values, rounded, magnitude, lost, roundings, largest)


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of heads, [R, H, D], by angles, [R, 1, at most D]; the other elements stay.

    That of latent attention takes the elements with even numbers for the first half.
    """

    angles: Tensor
    is_interleaved: bool
    is_latent: bool = False
    #: The factor of cosine and sine.
    magnitude: float = 1.0

    def forward(self, t: Tensor) -> Reference:
        """The rotated heads."""
        return self._turned(t, 1.0)

    def back(self, g: Tensor) -> Reference:
        """The gradient of the heads before rotation: turned back."""
        return self._turned(g, -1.0)

    def _turned(self, t: Tensor, sign: float) -> Reference:
        width, angles = self.angles.shape[-1], self.angles.double()
        turned, rest = t.double()[..., :width], t.double()[..., width:]
        if self.is_latent and sign > 0:
            turned = torch.cat([turned[..., ::2], turned[..., 1::2]], dim=-1)
        if self.is_interleaved:
            other = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
        else:
            first, second = turned.chunk(2, dim=-1)
            other = torch.cat([-second, first], dim=-1)
        values = turned * angles.cos() + sign * other * angles.sin()
        magnitude = turned.abs() + other.abs()
        if self.is_latent and sign < 0:
            values, magnitude = (
                torch.stack(x.chunk(2, -1), -1).flatten(-2) for x in (values, magnitude)
            )
        values = torch.cat([values * self.magnitude, rest], dim=-1)
        magnitude = torch.cat([magnitude * self.magnitude, rest.abs()], dim=-1)
        return Reference(values, magnitude, magnitude, _lost(t.dtype), roundings=3)


def total(*parts: Tensor) -> Reference:
    """A sum of tensors, each of whose steps is rounded."""
    wide = torch.stack([part.double() for part in parts])
    magnitude = wide.abs().sum(0)
    return Reference(wide.sum(0), magnitude, magnitude, _lost(parts[0].dtype), len(parts))


def _lost(dtype: torch.dtype) -> float:
    """What a number that is too small for its dtype can lose."""
    return max(_LOST, torch.finfo(dtype).smallest_normal * unit(dtype))
