"""Training in a layout with Megatron-Core's own classes, for comparisons: no product, collective or step of quantexp.

The model has Megatron's local layer spec, wrapped by its DistributedDataParallel; its schedules run the micro-batches,
and its optimizer steps with torch's Adam. What lets Megatron run on a CPU is the same as in `session`; functions that
`session` replaces although Megatron's own run on a CPU (the gradient's norm, Adam, scaling) are its own again.

Megatron's own attention refuses context parallelism: only Transformer Engine's has it. Here Megatron's
`gather_from_sequence_parallel_region` completes it: keys and values are gathered in the order of the ranks, their
gradients are reduced and scattered in the working dtype, and a mask replaces the causal one.

    # T tokens of a rank, B sequences, G key-value heads, D head_dim
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import clip_grads, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor
from torch.optim import adam

from quantexp.model.layout import Layout
from quantexp.model.sizes import distributes_optimizer, num_micro_batches_each
from quantexp.schema import Experiment
from quantexp.training.megatron.attention import LatentCoreAttention
from quantexp.training.megatron.initial_weights import load_initial_weights
from quantexp.training.megatron.model import build_chunks
from quantexp.training.megatron.specs import inject, stock_spec
from quantexp.training.megatron.transformer_config import optimizer_config, scheduler

Batch = dict[str, Tensor]
#: Called after the passes, before the optimizer.
Mark = Callable[[], None]
_REPLACED_BY_SESSION: list[tuple[ModuleType, str]] = [
    *((module, "get_grad_norm_fp32") for module in (clip_grads, megatron_optimizer)),
    *((module, "multi_tensor_scale_impl") for module in (clip_grads, megatron_optimizer)),
    (adam, "adam"),
]
Functions = list[tuple[ModuleType, str, Callable[..., Any]]]


def own_functions() -> Functions:
    """The functions of Megatron and torch that `session` replaces; call before it."""
    return [(module, name, getattr(module, name)) for module, name in _REPLACED_BY_SESSION]


@contextlib.contextmanager
def use(functions: Functions) -> Iterator[None]:
    """These functions are in their places again."""
    with contextlib.ExitStack() as stack:
        for module, name, function in functions:
            stack.enter_context(mock.patch.object(module, name, function))
        yield


class ContextAttention(LatentCoreAttention):
    """Megatron's core attention over the keys and values of all ranks that share a sequence."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        """The attention output [T, B, H*D]; the sequence is cut as `get_batch_on_this_cp_rank` cuts it."""
        group = parallel_state.get_context_parallel_group()
        key, value = (
            gather_from_sequence_parallel_region(x, group=group).contiguous() for x in (key, value)
        )
        output: Tensor = super().forward(query, key, value, _hidden(len(query), group), **options)
        return output


def _hidden(num_own: int, group: torch.distributed.ProcessGroup) -> Tensor:
    """True where an own query must not see a key, [1, 1, T, N T]."""
    chunks = torch.arange(2 * group.size() * (num_own // 2)).view(2 * group.size(), -1)
    by_rank = [torch.cat([chunks[r], chunks[-1 - r]]) for r in range(group.size())]
    return (torch.cat(by_rank) > by_rank[group.rank()][:, None])[None, None]


class StockTraining:
    """The model, its optimizer and schedule; weights and micro-batches are those of quantexp."""

    def __init__(self, experiment: Experiment, functions: Functions) -> None:
        training, layout = experiment.training, Layout.of(experiment)
        spec = stock_spec(experiment.model)
        if layout.context > 1:
            spec = inject(spec, {DotProductAttention: ContextAttention})
        chunks, config = build_chunks(
            experiment.model, training, spec, layout, experiment.parallel.dispatcher
        )
        load_initial_weights(chunks, experiment)
        is_distributed = distributes_optimizer(experiment)
        self.models = _wrapped(chunks, config, is_distributed)
        self.optimizer = get_megatron_optimizer(
            optimizer_config(training, is_distributed), self.models
        )
        self.scheduler = scheduler(training, self.optimizer)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self.training, self.functions = training, functions
        self.num_micro_batches = num_micro_batches_each(experiment)

    def step(self, batch: Batch, mark: Mark) -> tuple[float, float]:
        """One optimizer step on equal micro-batches; the loss, 0 before the last stage, and the gradient's norm.

        Under context parallelism the loss is the rank's part.
        """
        with use(self.functions):
            for model in self.models:
                model.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = self._passes(batch)
            mark()
            _, norm, _ = self.optimizer.step()
            self.scheduler.step(1)
        return sum(float(each["loss"]) for each in losses) / self.num_micro_batches, float(norm)

    def _passes(self, batch: Batch) -> list[dict[str, Tensor]]:
        count = batch["loss_mask"].sum()
        several = [[batch] * self.num_micro_batches for _ in self.models]

        def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
            own = get_batch_on_this_cp_rank(dict(next(batches)))

            def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                loss = (losses.float() * own["loss_mask"]).sum() / count
                return loss, {"loss": loss.detach().clone()}

            return model(own["tokens"], own["position_ids"], None, labels=own["labels"]), mean

        results: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(x) for x in several] if len(several) > 1 else iter(several[0]),
            model=self.models,
            num_microbatches=self.num_micro_batches,
            seq_length=self.training.seq_length,
            micro_batch_size=self.training.micro_batch_size,
            forward_only=False,
        )
        return results


def _wrapped(chunks: list[Any], config: Any, distributed: bool) -> list[DistributedDataParallel]:
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
    )
    is_16_bit = config.bf16 or config.fp16
    models = [Float16Module(config, chunk) if is_16_bit else chunk for chunk in chunks]
    return [
        DistributedDataParallel(config, ddp, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]
