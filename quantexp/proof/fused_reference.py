"""Rows of attention in float64, with bounds for a kernel that keeps S and P to itself.

    S = a q k^T    P = softmax(S)    o = P v    dP = dO v^T    D_i = sum_j P_ij dP_ij    dS = P (dP - D)
    dq = a dS k    dk = a dS^T q     dv = P^T dO

A kernel computes S and the softmax in float32. Before they are multiplied it may round P and dS to the working dtype,
once each, and it takes D from the rounded o. The bounds below add these roundings to those of `products`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantexp.proof.heads import Heads
from quantexp.proof.products import Reference, flushed
from quantexp.quant.sites import DGRAD_V_DO, FPROP_K, FPROP_Q, FPROP_V, Operand, Slot

#: Elements of P that the check of dk and dv computes at most.
_MOST = 1 << 22


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

    @classmethod
    def of(
        cls, q_RD: Tensor, k_KD: Tensor, v_KE: Tensor, hidden_RK: Tensor, scale: float
    ) -> FusedRows:
        """From expected operands; `hidden_RK` is True where a query does not see a key."""
        q, k, v = q_RD.double(), k_KD.double(), v_KE.double()
        S = (q @ k.t() * scale).masked_fill(hidden_RK, -math.inf)
        largest = float(q.norm(dim=1).max() * k.norm(dim=1).max()) * abs(scale)
        exponent = 2 * math.sqrt(q.shape[1]) * largest + 4
        return cls(q, k, v, torch.softmax(S, dim=1), scale, exponent)

    def output(self) -> Reference:
        """o, [R, E]."""
        values, spread = self.P_RK @ self.v_KE, self.P_RK @ self.v_KE.abs()
        lost = flushed(self.P_RK, self.v_KE) * len(self.v_KE)
        return Reference(values, values.abs() + 2 * spread, self._summed(spread), lost)

    def query_gradient(self, dO_RE: Tensor) -> Reference:
        """dq, [R, D]."""
        dS, spread = self._scores_gradient(dO_RE)
        values = dS @ self.k_KD * self.scale
        bounded = self._bounded(values, spread @ self.k_KD.abs() * abs(self.scale))
        return replace(bounded, largest=spread.amax())

    def key_gradient(self, dO_RE: Tensor, keys: Tensor) -> Reference:
        """dk of some keys, [keys, D], the part of these queries."""
        dS, spread = self._scores_gradient(dO_RE)
        values = dS[:, keys].t() @ self.q_RD * self.scale
        bounded = self._bounded(values, spread[:, keys].t() @ self.q_RD.abs() * abs(self.scale))
        return replace(bounded, largest=spread.amax())

    def value_gradient(self, dO_RE: Tensor, keys: Tensor) -> Reference:
        """dv of some keys, [keys, E], the part of these queries."""
        P_KR = self.P_RK[:, keys].t()
        return self._bounded(P_KR @ dO_RE, P_KR @ dO_RE.abs())

    def _scores_gradient(self, dO_RE: Tensor) -> tuple[Tensor, Tensor]:
        """dS, and the sum of the magnitudes that are rounded on the way to it."""
        dP = dO_RE @ self.v_KE.t()
        D = (self.P_RK * dP).sum(dim=1, keepdim=True)
        o = self.P_RK @ self.v_KE
        of_D = (o.abs() * dO_RE.abs()).sum(dim=1, keepdim=True)
        size = dO_RE.abs() @ self.v_KE.t().abs()
        return self.P_RK * (dP - D), self.P_RK * (size + D.abs() + of_D)

    def _bounded(self, values: Tensor, spread: Tensor) -> Reference:
        lost = flushed(self.k_KD, self.q_RD) * (len(self.k_KD) + len(self.q_RD))
        return Reference(values, values.abs() + 3 * spread, self._summed(spread), lost)

    def _summed(self, spread: Tensor) -> Tensor:
        return spread * (math.sqrt(len(self.k_KD)) + self.exponent)


#: Some rows of a tensor of one head, and what they must be; the arguments are the call's lines and the softmax's scale.
FusedReference = Callable[[Heads, float], tuple[Tensor, Reference]]


def fused_output(heads: Heads, scale: float) -> tuple[Tensor, Reference]:
    """o of the chosen queries of the first head."""
    return heads.queries, _rows(heads, heads.queries, heads.heads[0], scale).output()


def fused_query_gradient(heads: Heads, scale: float) -> tuple[Tensor, Reference]:
    """dq of the same."""
    rows, head = heads.queries, heads.heads[0]
    dO = _output_gradient(heads, rows, head)
    expected = _rows(heads, rows, head, scale).query_gradient(dO)
    return rows, expected.zero_where(heads.clipped(FPROP_Q, rows))


def fused_key_gradient(heads: Heads, scale: float) -> tuple[Tensor, Reference]:
    """dk of some of the last keys, which few queries see under a causal mask, over the group."""
    return _of_keys(heads, scale, FPROP_K)


def fused_value_gradient(heads: Heads, scale: float) -> tuple[Tensor, Reference]:
    """dv of the same."""
    return _of_keys(heads, scale, FPROP_V)


def _of_keys(heads: Heads, scale: float, slot: Slot) -> tuple[Tensor, Reference]:
    T, K = heads.num_queries, heads.num_keys
    first = K - max(1, min(K, _MOST // (K * len(heads.heads))))
    rows = torch.arange(first if heads.mask is None else 0, T, device=heads.keys.device)
    keys = heads.keys[heads.keys >= first]
    if not len(keys):
        keys = torch.arange(max(first, K - len(heads.keys)), K, device=rows.device)
    parts = []
    for head in heads.heads:
        fused, dO = _rows(heads, rows, head, scale), _output_gradient(heads, rows, head)
        gradient = fused.value_gradient if slot is FPROP_V else fused.key_gradient
        parts.append(gradient(dO, keys))
    expected = parts[0]
    for part in parts[1:]:
        expected = expected.plus(part)
    return keys, expected.again(2).zero_where(heads.clipped(slot, keys))


def _rows(heads: Heads, rows: Tensor, head: int, scale: float) -> FusedRows:
    mask = heads.mask
    keys = torch.arange(heads.num_keys, device=rows.device)
    hidden = keys > rows[:, None]
    if mask is not None:
        hidden = mask[heads.sequence % mask.shape[0], 0, rows]
    dims = torch.arange(heads.call.sources[Operand.V].shape[3], device=rows.device)
    q, k = heads.lines(FPROP_Q, rows, head), heads.lines(FPROP_K, keys, head)
    return FusedRows.of(q(), k(), heads.lines(FPROP_V, dims, head)().t(), hidden, scale)


def _output_gradient(heads: Heads, rows: Tensor, head: int) -> Tensor:
    dims = torch.arange(heads.call.sources[Operand.DO].shape[2], device=rows.device)
    return heads.lines(DGRAD_V_DO, dims, head)().t()[rows].double()
