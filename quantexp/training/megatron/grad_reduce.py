"""Rounds gradients to a number format on their way through the data-parallel ranks.

    once       a rank rounds its own gradient g; the ranks add them in float32
    each_hop   the sum s goes from rank to rank, s := round(s) + g; only the last sum is not rounded

A gradient has been multiplied by 1 / ranks before, as Megatron-Core does, so the sum is the mean. With `each_hop` the
last rank keeps the sum and all others zeros, so that Megatron's own reduction distributes it and changes no bit. Ranks
of context parallelism take part. Parameters of a group of one rank, experts for example that no other rank holds, are
not sent and keep their gradients. What is added afterwards, over tensor-parallel ranks (norms with sequence
parallelism) and over the first and the last stage (a tied embedding), is in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from quantexp.formats import finite_amax
from quantexp.model.pieces import Piece
from quantexp.model.shards import expert_of
from quantexp.proof.outside_products import SendWatch, StateWatch
from quantexp.quant.outside_products import StateSlot
from quantexp.schema import RoundedAt
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.rounded_pieces import RoundedPiece, draw_of


class GradientRounding:
    """Replaces Megatron's `finalize_model_grads` by one that rounds before it reduces.

    Args:
        slot: what the scheme declares.
        models: the wrapped chunks, without overlap of reduction and backward pass.
        parts: this rank's parts of their parameters.
        seed: the run's.
    """

    def __init__(
        self,
        slot: StateSlot,
        models: Sequence[DistributedDataParallel],
        parts: Mapping[str, Part],
        seed: int,
    ) -> None:
        self.slot, self.seed = slot, seed
        self._names = {id(part.tensor): name for name, part in parts.items()}
        self._parts = parts
        self._buckets = [
            (bucket, ranks, bucket.gradient_scaling_factor)
            for model in models
            for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups)
            for ranks in (_ranks(group),)
            for bucket in group.buckets
            if ranks.size() > 1
        ]
        for bucket, _, _ in self._buckets:
            bucket.gradient_scaling_factor = 1.0  # applied here, before the gradient is rounded
        self._iteration = 0
        self._watch: StateWatch | None = None

    @contextlib.contextmanager
    def of_iteration(self, iteration: int, watch: StateWatch | None) -> Iterator[None]:
        """Round inside as in this iteration; `watch` judges what is sent."""
        self._iteration, self._watch = iteration, watch
        try:
            yield
        finally:
            self._watch = None

    def finalize(self, *args: Any, **kwargs: Any) -> None:
        """`finalize_model_grads`, and the rounding before it."""
        for bucket, _, factor in self._buckets:
            bucket.grad_data.mul_(factor)
        if self.slot.product == RoundedAt.once.value:
            pieces = {piece.name: piece for piece, _ in self._pieces()}
            before = self._sources(pieces.values())
            for piece, group in self._pieces():
                self._round(piece, group)
            with self._sending(pieces, before):
                finalize_model_grads(*args, **kwargs)
            return
        for piece, group in self._pieces():
            self._pass_on(piece, group)
        finalize_model_grads(*args, **kwargs)

    def _pieces(self) -> Iterator[tuple[RoundedPiece, Any]]:
        """Every gradient that is reduced, with its group; in the same order on all ranks of the group."""
        for bucket, group, _ in self._buckets:
            for parameter in bucket.params_list:
                part = self._parts[name := self._names[id(parameter)]]
                piece = Piece(part.parameter.shape, part.shard, 0, part.tensor.numel())
                yield RoundedPiece(name, piece, parameter.main_grad.view(-1), self.slot.spec), group

    def _round(self, piece: RoundedPiece, group: Any) -> Tensor | None:
        """Round a gradient in place; returns the amax of its whole tensor, if its scale depends on it."""
        amax = self._amax(piece)
        # Each rank of the group draws its own numbers.
        stream = f"{piece.name} {self.slot} {group.rank()}"
        draw = draw_of(piece.spec, self.seed, stream, self._iteration)
        for box in piece.boxes():
            piece.round(piece.values(box), box.row, box.column, amax, draw)
        return amax

    def _amax(self, piece: RoundedPiece) -> Tensor | None:
        """The amax of a gradient over the ranks that have the other parts of it."""
        if not piece.spec.is_scaled:
            return None
        amax = finite_amax(piece.flat)
        if piece.piece.shard.axis is not None:
            group = (
                parallel_state.get_tensor_model_parallel_group()
                if expert_of(piece.name) is None
                else parallel_state.get_expert_tensor_parallel_group()
            )
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
        return amax

    def _pass_on(self, piece: RoundedPiece, group: Any) -> None:
        """Add what the rank before has sent, round the sum, and send it to the next; the last one keeps it."""
        rank, last = group.rank(), group.size() - 1
        if rank > 0:
            received = torch.empty_like(piece.flat)
            torch.distributed.recv(received, group=group, group_src=rank - 1)
            piece.flat.add_(received)
        if rank == last:
            return
        sources = self._sources([piece])
        self._round(piece, group)
        with self._sending({piece.name: piece}, sources):
            torch.distributed.send(piece.flat, group=group, group_dst=rank + 1)
        piece.flat.zero_()

    def _sources(self, pieces: Any) -> dict[str, Tensor]:
        """The gradients before they are rounded, in an iteration that is watched."""
        return {} if self._watch is None else {each.name: each.flat.clone() for each in pieces}

    @contextlib.contextmanager
    def _sending(
        self, pieces: Mapping[str, RoundedPiece], before: Mapping[str, Tensor]
    ) -> Iterator[None]:
        """Judge the gradients that are sent inside, each of which must be."""
        watch = self._watch
        if watch is None:
            yield
            return
        sends = SendWatch(
            {name: piece.flat for name, piece in pieces.items()}, self._judging(pieces, before)
        )
        with sends:
            yield
        for name in sends.left:
            watch.missing(self.slot, name)

    def _judging(
        self, pieces: Mapping[str, RoundedPiece], before: Mapping[str, Tensor]
    ) -> Callable[[str], None]:
        def judge(name: str) -> None:
            assert self._watch is not None
            piece = pieces[name]
            source = RoundedPiece(name, piece.piece, before[name], piece.spec)
            amax = self._amax(source)
            for box in piece.boxes():
                self._watch.see(self.slot, name, piece.values(box), source.values(box), amax)

        return judge


def _ranks(buckets: Any) -> Any:
    """The process group that a group of Megatron's buckets is reduced over."""
    if buckets.ddp_config.use_distributed_optimizer:
        return buckets.intra_distributed_optimizer_instance_group
    return buckets.data_parallel_group
