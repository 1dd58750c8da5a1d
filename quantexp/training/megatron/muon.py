"""Muon for the decoder's weight matrices and AdamW for everything else, in place of Megatron's optimizer.

A step moves a matrix along its momentum, orthogonalised by five Newton-Schulz iterations in bf16 (Jordan et al. 2024),
with the factor that gives the update the root mean square of AdamW's, so that one learning rate serves both (arXiv
2502.16982, section 2.2):

    b = mu b + (1 - mu) g
    u = (1 - mu) g + mu b
    w = w - lr wd w - lr 0.2 sqrt(max(rows, columns)) NS(u)

These are the conventions of `torch.optim.Muon`, which takes whole matrices alone. Here each *published* matrix is
orthogonalised by itself: q, k and v of Megatron's fused weight, gate and up of fc1. Ranks that divide one gather its
update, and each keeps its own part of the result; so the numbers do not depend on the layout.

    # R rows, C columns of a whole parameter of Megatron's
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from quantexp.model.huggingface.blocks import blocks_of
from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.layout import Layout, Place
from quantexp.model.shards import WHOLE, Shard, expert_of, layer_of, shard_of
from quantexp.model.training_state import MOMENTUM
from quantexp.schema import TrainingConfig
from quantexp.training.megatron.finite import chained
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.state_shards import held_pieces

#: Coefficients, steps and the least norm of Jordan's iteration.
_A, _B, _C, _STEPS, _EPS = 3.4445, -4.7750, 2.0315, 5, 1e-7
#: The attribute of main weights that Muon moves.
_MUON = "muon"
#: The root mean square of AdamW's updates (arXiv 2502.16982, 2.2).
_RMS = 0.2


def use_muon(
    optimizer: Any,
    parts: Mapping[str, Part],
    layout: Layout,
    place: Place,
    training: TrainingConfig,
) -> None:
    """Replace the AdamW of each of Megatron's optimizers, before the first step and the schedule."""
    for name, held in held_pieces(optimizer, parts).items():
        if is_matrix(parts[name].parameter):
            vars(held.main)[_MUON] = Matrix(parts[name].parameter, layout, place)
    for each in chained(optimizer):
        if not each.is_stub_optimizer:
            each.optimizer = MuonAndAdamW(each.optimizer.param_groups, training.muon_momentum)


def is_matrix(parameter: Parameter) -> bool:
    """Whether Muon moves a parameter: the weight of a linear layer.

    Embedding, output layer, routers, norms and biases have AdamW.
    """
    is_inside = layer_of(parameter.name) is not None and parameter.width is not None
    return is_inside and not parameter.name.endswith("router.weight")


@dataclass(frozen=True)
class Matrix:
    """A parameter of Megatron's, and the part of it that a rank has."""

    parameter: Parameter
    layout: Layout
    place: Place

    def published(self) -> Iterator[Tensor]:
        """The rows, in the whole parameter, of each published matrix, in that matrix's order."""
        rows: dict[str, list[tuple[int, int, int]]] = {}
        for block in blocks_of(self.parameter, WHOLE):
            rows.setdefault(block.tensor, []).append((block.first, block.part_row, block.count))
        for blocks in rows.values():
            yield torch.cat([torch.arange(at, at + count) for _, at, count in sorted(blocks)])

    def shard(self, rank: int | None = None) -> Shard:
        """The part of a rank of the group that divides the parameter; None: this rank's."""
        place = self.place
        if rank is not None:
            is_routed = expert_of(self.parameter.name) is not None
            place = replace(place, **{"expert_tensor" if is_routed else "tensor": rank})
        return shard_of(self.parameter.name, self.parameter.shape, self.layout, place)

    def whole(self, own: Tensor) -> Tensor:
        """The whole parameter's values, [R, C], from the parts of all ranks, which all call this."""
        if self.shard() == WHOLE:
            return own
        group = (
            parallel_state.get_tensor_model_parallel_group()
            if expert_of(self.parameter.name) is None
            else parallel_state.get_expert_tensor_parallel_group()
        )
        parts = [torch.empty_like(own) for _ in range(group.size())]
        torch.distributed.all_gather(parts, own.contiguous(), group=group)
        whole = own.new_empty(self.parameter.shape)
        for rank, part in enumerate(parts):
            shard = self.shard(rank)
            whole.index_copy_(_axis(shard), _indices(shard).to(own.device), part)
        return whole

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter's values."""
        shard = self.shard()
        if shard == WHOLE:
            return whole
        return whole.index_select(_axis(shard), _indices(shard).to(whole.device))


class MuonAndAdamW(torch.optim.AdamW):
    """AdamW, but Muon for parameters with a `muon` attribute, whose state has their momentum alone.

    Args:
        groups: the parameters, with the options of AdamW.
        momentum: of Muon, at least 0 and below 1.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], momentum: float) -> None:
        super().__init__(groups)
        self._momentum = momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        assert closure is None
        each = [(p, group) for group in self.param_groups for p in group["params"]]
        gradients = [(p, p.grad, group) for p, group in each if hasattr(p, _MUON)]
        for p, *_ in gradients:
            p.grad = None  # AdamW leaves it as it is
        super().step()
        for p, gradient, group in gradients:
            p.grad = gradient
            if gradient is not None:
                self._move(p, gradient, group)

    def _move(self, p: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        matrix: Matrix = getattr(p, _MUON)
        state = self.state[p]
        if not state:
            state |= {"step": torch.tensor(0.0), MOMENTUM: torch.zeros_like(p)}
        state["step"] += 1
        momentum, lr = state[MOMENTUM], float(group["lr"])
        momentum.lerp_(gradient, 1 - self._momentum)
        whole = matrix.whole(gradient.lerp(momentum, self._momentum))
        update = torch.empty_like(whole)
        for rows in matrix.published():
            rows = rows.to(whole.device)
            factor = _RMS * math.sqrt(max(len(rows), whole.shape[1]))
            update[rows] = orthogonalised(whole[rows]).to(update.dtype).mul_(factor)
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(matrix.own(update), alpha=-lr)


def orthogonalised(x_RC: Tensor) -> Tensor:
    """Nearly U V^T of x = U S V^T, in bf16: singular values become about 0.7 to 1.2. Zero stays zero."""
    x = x_RC.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


def _axis(shard: Shard) -> int:
    assert shard.axis is not None
    return shard.axis


def _indices(shard: Shard) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in shard.ranges])
