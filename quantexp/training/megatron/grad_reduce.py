"""Data parallelism: fp32 gradients in buckets, reduced in the backward pass or after it, rounded to a number format.

    once       a rank rounds its own gradient g; the ranks add them in float32
    each_hop   the sum s goes from rank to rank, s := round(s) + g; only the last sum is not rounded

A gradient has been multiplied by 1 / ranks before, as Megatron-Core does, so the sum is the mean. With `each_hop` the
last rank keeps the sum and all others zeros, so that Megatron's own reduction distributes it unchanged. Ranks
of context parallelism take part. Parameters of a group of one rank, experts for example that no other rank holds, are
not sent and keep their gradients. What is added afterwards, over tensor-parallel ranks (norms with sequence
parallelism) and over the first and the last stage (a tied embedding), is in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from quantexp.formats import finite_amax
from quantexp.model.pieces import Box, Piece
from quantexp.model.shards import expert_of
from quantexp.proof.draws import Moment, Randomness
from quantexp.proof.outside_products import StateWatch
from quantexp.proof.sending import SendWatch
from quantexp.quant.outside_products import StateSlot
from quantexp.schema import Precision, RoundedAt
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.rounded_pieces import RoundedPiece, draw_of


@dataclass(frozen=True)
class _Rounded:
    """A gradient that has been rounded."""

    piece: RoundedPiece
    #: Of the whole tensor, if its scale depends on it.
    amax: Tensor | None
    #: The elements before, if the proof compares them.
    before: Tensor | None
    #: What the random numbers follow from, by the proof's own rule.
    draw: Randomness

    def source(self, box: Box) -> Tensor:
        """The values of a box before they were rounded."""
        assert self.before is not None
        return replace(self.piece, flat=self.before).values(box)


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
            rounded = [self._round(piece, group) for piece, group in self._pieces()]
            with self._sending(rounded):
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

    def _round(self, piece: RoundedPiece, group: Any) -> _Rounded:
        """Round a gradient in place."""
        amax = self._amax(piece)
        before = None if self._watch is None else piece.flat.clone()
        if self._watch is not None and amax is not None:
            tensor = f"{piece.name} on {self._owner(piece, group)}"
            self._watch.scale(self.slot, tensor, finite_amax(piece.flat), amax)
        # Each rank of the group draws its own numbers; parts of one gradient draw by position.
        stream = f"{piece.name} {self.slot} {group.rank()}"
        draw = draw_of(piece.spec, self.seed, stream, self._iteration)
        for box in piece.boxes():
            piece.round(piece.values(box), box.row, box.column, amax, draw)
        seen_draw = Moment(self.seed, self._iteration).draw(piece.spec, stream)
        return _Rounded(piece, amax, before, seen_draw)

    @staticmethod
    def _owner(piece: RoundedPiece, group: Any) -> str:
        """The ranks that have parts of one gradient, in words; a gradient that is not divided is a rank's own."""
        if piece.piece.shard.axis is None:
            return f"rank {torch.distributed.get_rank()}"
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return f"data-parallel rank {group.rank()} of stage {stage}"

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
        with self._sending([self._round(piece, group)]):
            torch.distributed.send(piece.flat, group=group, group_dst=rank + 1)
        piece.flat.zero_()

    @contextlib.contextmanager
    def _sending(self, rounded: Sequence[_Rounded]) -> Iterator[None]:
        """Judge the gradients that are sent inside, each of which must be."""
        watch = self._watch
        if watch is None:
            yield
            return
        by_name = {each.piece.name: each for each in rounded}

        def judge(name: str) -> None:
            each = by_name[name]
            for box in each.piece.boxes():
                x, place = each.piece.values(box), each.piece.place(box.row, box.column)
                watch.see(self.slot, name, x, each.source(box), each.amax, place, each.draw)

        sends = SendWatch({name: each.piece.flat for name, each in by_name.items()}, judge)
        with sends:
            yield
        for name in sends.left:
            watch.missing(self.slot, name)


def _ranks(buckets: Any) -> Any:
    """The process group that a group of Megatron's buckets is reduced over."""
    if buckets.ddp_config.use_distributed_optimizer:
        return buckets.intra_distributed_optimizer_instance_group
    return buckets.data_parallel_group


def overlaps(device: torch.device) -> bool:
    """Whether reductions and gathers run while the device computes: a CPU would share its cores with them."""
    return device.type == "cuda"


def wrapped(
    chunks: list[Any],
    config: Any,
    precision: Precision,
    device: torch.device,
    *,
    distributed: bool,
    overlaps_reduction: bool,
) -> list[DistributedDataParallel]:
    """Each chunk on the device, in the working precision, with buckets for its gradients."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlaps_reduction,
        overlap_param_gather=overlaps_reduction and distributed,
        use_distributed_optimizer=distributed,
    )
    models = []
    for index, chunk in enumerate(chunks):
        model: Any = chunk.to(device)
        if precision is not Precision.fp32:
            model = Float16Module(config, model)
        models.append(DistributedDataParallel(config, ddp, model, disable_bucketing=index > 0))
    return models


def let_schedules_overlap(config: Any, models: list[DistributedDataParallel]) -> None:
    """Let the schedules start the reduction of gradients, and the gathering of parameters, while they compute."""
    ddp = models[0].ddp_config
    if not ddp.overlap_grad_reduce:
        return

    def of_each(functions: list[Any]) -> Any:
        return functions if len(functions) > 1 else functions[0]

    config.no_sync_func = of_each([model.no_sync for model in models])
    if len(models) > 1:
        config.grad_sync_func = of_each([model.start_grad_sync for model in models])
        if ddp.overlap_param_gather:
            config.param_sync_func = of_each([model.start_param_sync for model in models])
