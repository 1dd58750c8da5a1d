"""Rows of attention in float64, with bounds for a kernel that keeps S and P to itself.

    S = a q k^T    P = softmax(S)    o = P v    dP = dO v^T    D_i = sum_j P_ij dP_ij    dS = P (dP - D)
    dq = a dS k    dk = a dS^T q     dv = P^T dO

A kernel computes S and the softmax in float32. Before they are multiplied it may round P and dS to the working dtype,
once each, and it takes D from the rounded o. The bounds below add these roundings to those of `products`. What is below
the smallest normal number of the dtype loses as much as that one does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantexp.proof.contrast import Rounded
from quantexp.proof.products import Reference, flushed, unit
from quantexp.quant.sites import Product

#: Queries or keys whose part of a gradient a kernel may round before the next is added.
_BLOCK = 32


@dataclass(frozen=True)
class FusedRows:
    """Some queries of one head against all keys, in float64."""

    q_RD: Tensor
    k_KD: Tensor
    v_KE: Tensor
    P_RK: Tensor
    scale: float
    #: What an error of float32 sums in S changes of a probability, in units of LAMBDA 2^-24.
    exponent: float
    #: The smallest normal number of the operands' dtype, and the largest relative change by rounding to it.
    smallest: float
    unit: float

    @classmethod
    def of(
        cls, q_RD: Tensor, k_KD: Tensor, v_KE: Tensor, hidden_RK: Tensor, scale: float
    ) -> FusedRows:
        """From expected operands; `hidden_RK` is True where a query does not see a key."""
        q, k, v = q_RD.double(), k_KD.double(), v_KE.double()
        S = (q @ k.t() * scale).masked_fill(hidden_RK, -math.inf)
        largest = float(q.norm(dim=1).max() * k.norm(dim=1).max()) * abs(scale)
        exponent = 2 * math.sqrt(q.shape[1]) * largest + 4
        smallest, own_unit = torch.finfo(q_RD.dtype).smallest_normal, unit(q_RD.dtype)
        return cls(q, k, v, torch.softmax(S, dim=1), scale, exponent, smallest, own_unit)

    def product(self, product: Product, dO_RE: Tensor | None, keys: Tensor) -> Reference:
        """o [R, E] or dq [R, D] of the queries, their part of dk [keys, D] or dv [keys, E]; o needs no dO."""
        rounded = self.P_RK.clamp_min(self.smallest)
        if dO_RE is None:
            values, spread = self.P_RK @ self.v_KE, rounded @ self.v_KE.abs()
            lost = flushed(self.P_RK, self.v_KE) * len(self.v_KE)
            return Reference(values, values.abs() + 2 * spread, self._summed(spread), lost)
        if product is Product.DGRAD_V:
            P_KR = self.P_RK[:, keys].t()
            return self._bounded(P_KR @ dO_RE, rounded[:, keys].t() @ dO_RE.abs())
        dS, spread = self._scores_gradient(dO_RE)
        left, size, right = dS, spread, self.k_KD * self.scale
        if product is Product.DGRAD_K:
            left, size, right = dS[:, keys].t(), spread[:, keys].t(), self.q_RD * self.scale
        return replace(self._bounded(left @ right, size @ right.abs()), largest=spread.amax())

    def rounded(self, product: Product, dO_RE: Tensor | None, keys: Tensor) -> Rounded:
        """The same as the product that a kernel computes, with what it rounds."""
        lost = self.smallest * self.unit
        of_P = self.P_RK.clamp_max(lost)
        if dO_RE is None:
            return Rounded(self.P_RK, self.v_KE, of_P, 1)
        P = self.P_RK[:, keys]
        if product is Product.DGRAD_V:
            return Rounded(P.t(), dO_RE, of_P[:, keys].t(), 1, len(P) / _BLOCK)
        dP = dO_RE @ self.v_KE.t()
        o_dO = (self.P_RK @ self.v_KE) * dO_RE
        dS = self.P_RK * (dP - o_dO.sum(dim=1, keepdim=True))
        of_dS = dS.abs().clamp_max(lost) + of_P * (dP - o_dO.sum(dim=1, keepdim=True)).abs()
        of_D = o_dO.square().sum(dim=1, keepdim=True)
        of_D += (self.P_RK * dP).square().sum(dim=1, keepdim=True)
        if product is Product.DGRAD_Q:
            sums, right = len(self.k_KD) / _BLOCK, self.k_KD * self.scale
            return Rounded(dS, right, of_dS, 2, sums, self.P_RK, of_D)
        dS, of_dS, right = dS[:, keys].t(), of_dS[:, keys].t(), self.q_RD * self.scale
        return Rounded(dS, right, of_dS, 2, len(P) / _BLOCK, P.t(), of_D.t(), keys_dim=0)

    def _scores_gradient(self, dO_RE: Tensor) -> tuple[Tensor, Tensor]:
        """dS, and the sum of the magnitudes that are rounded on the way to it."""
        dP = dO_RE @ self.v_KE.t()
        D = (self.P_RK * dP).sum(dim=1, keepdim=True)
        o = (self.P_RK @ self.v_KE).abs().clamp_min(self.smallest)
        of_D = (o * dO_RE.abs()).sum(dim=1, keepdim=True)
        size = dO_RE.abs() @ self.v_KE.t().abs()
        spread = self.P_RK.clamp_min(self.smallest) * (size + D.abs() + of_D)
        return self.P_RK * (dP - D), spread.clamp_min(self.smallest)

    def _bounded(self, values: Tensor, spread: Tensor) -> Reference:
        terms = len(self.k_KD) + len(self.q_RD)
        lost = flushed(self.k_KD, self.q_RD) * terms + self.smallest * self.unit * terms / _BLOCK
        return Reference(values, values.abs() + 3 * spread, self._summed(spread), lost)

    def _summed(self, spread: Tensor) -> Tensor:
        return spread * (math.sqrt(len(self.k_KD)) + self.exponent)
