"""One optimizer step of a Megatron-Core model over `global_batch_size` sequences in micro-batches, in any layout.

The data-parallel ranks share the micro-batches; Megatron's DistributedDataParallel averages the gradients over them.
The loss is the mean over all of them. It is known on the last stage of a pipeline, and sent to all.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from quantexp.capture.store.queue import wait_for_copies
from quantexp.config.start_point import StartPoint
from quantexp.model.layout import Layout
from quantexp.model.sizes import distributes_optimizer, flops_per_iteration, num_micro_batches_each
from quantexp.proof.outside_products import StateWatch
from quantexp.quant.outside_products import reduced_slot, state_slots
from quantexp.quant.precision import PrecisionMap
from quantexp.quant.step_state import StepState
from quantexp.quant.weight_cache.weights import WeightCopies
from quantexp.runs.metrics import Metrics, lowers_scale
from quantexp.schema import AuxLoss, Experiment, Optimizer, Precision, Recompute
from quantexp.training.megatron.callbacks import Observer
from quantexp.training.megatron.collectives import (
    complete_gradients,
    mean_over_data_parallel,
    merge_amaxes,
    sum_over_model_parallel,
    sum_over_stages,
)
from quantexp.training.megatron.device import device_name, memory_gb, peak_tflops
from quantexp.training.megatron.experts import forget_balancing_loss, take_balancing_loss
from quantexp.training.megatron.finite import agree_on_overflow, cause
from quantexp.training.megatron.grad_reduce import (
    GradientRounding,
    let_schedules_overlap,
    overlaps,
    wrapped,
)
from quantexp.training.megatron.initial_weights import load_initial_weights, perturb_weights
from quantexp.training.megatron.lookout import first_of_all, looking_out
from quantexp.training.megatron.model import (
    build_chunks,
    scheme_modules,
    set_precision,
    share_weight_copies,
)
from quantexp.training.megatron.muon import use_muon
from quantexp.training.megatron.numerics_state import has_delayed_scales
from quantexp.training.megatron.parameters import parts_of
from quantexp.training.megatron.passes import Batch, Begin, Passes
from quantexp.training.megatron.rounded_state import RoundedState
from quantexp.training.megatron.state_shards import (
    RankState,
    held_pieces,
    load_state,
    loss_scale_of,
    written_pieces,
)
from quantexp.training.megatron.transformer_config import optimizer_config, rate, scheduler
from quantexp.training.megatron.watched_sums import SumWatch
from quantexp.training.megatron.watched_updates import UpdateWatch

#: One spec for all layers, or one per layer.
Spec: TypeAlias = ModuleSpec | TransformerBlockSubmodules


class Stepper:
    """The model with its optimizer and schedule; runs single steps and evaluations."""

    def __init__(
        self,
        experiment: Experiment,
        layer_spec: Spec,
        device: torch.device,
        observer: Observer,
        step_state: StepState,
        own: StartPoint | None = None,
    ) -> None:
        """`own` is the run's own checkpoint, from which it goes on; None starts as configured."""
        training = experiment.training
        self.training, self.observer, self.device = training, observer, device
        self._is_fp16 = training.precision is Precision.fp16
        self._first_free = experiment.first_iteration + training.held_iterations
        self.layout, self.model = Layout.of(experiment), experiment.model
        forget_balancing_loss()
        dispatcher = experiment.parallel.dispatcher
        self.chunks, config = build_chunks(
            self.model, training, layer_spec, self.layout, dispatcher, experiment.quant
        )
        self.copies, self.step_state = WeightCopies(), step_state
        for chunk in self.chunks:
            share_weight_copies(chunk, self.copies)
        #: The micro-batches of the last step.
        self._seen: list[Batch] = []
        #: Steps left out in a row before the first one here.
        self.nonfinite = 0
        start = load_initial_weights(self.chunks, experiment, own)
        place = self.layout.place(torch.distributed.get_rank())
        self.parts = parts_of(self.chunks, experiment.model, self.layout, place)
        self.is_distributed = distributes_optimizer(experiment)
        reduced = reduced_slot(experiment.quant)
        self.models = wrapped(
            self.chunks,
            config,
            training.precision,
            device,
            distributed=self.is_distributed,
            overlaps_reduction=overlaps(device) and reduced is None,
        )
        self.optimizer = get_megatron_optimizer(
            optimizer_config(training, self.is_distributed), self.models
        )
        if training.optimizer is Optimizer.muon:
            use_muon(self.optimizer, self.parts, self.layout, place, training)
        agree_on_overflow(self.optimizer)
        self.scheduler = scheduler(training, self.optimizer)
        #: What the scheme rounds outside of products.
        slots, self.reduction = state_slots(experiment.quant), None
        self.rounded = RoundedState(slots, self.optimizer, self.parts, training, own is None)
        if start is not None:
            self._resume(start, with_state=own is not None or training.start_optimizer)
        if own is None and training.start_optimizer:
            perturb_weights(self.parts, training)
        self.updates = UpdateWatch(experiment, self.optimizer, self.parts, start, own is not None)
        finalize, added = finalize_model_grads, self.models
        if reduced is not None:
            self.reduction = GradientRounding(reduced, added, self.parts, training.seed)
            finalize, added = self.reduction.finalize, []
        self.sums = SumWatch(experiment, added, self.parts, self.optimizer, self.chunks)
        config.finalize_model_grads_func = partial(self.sums.finalize, finalize)
        config.grad_scale_func = self.optimizer.scale_loss
        let_schedules_overlap(config, self.models)
        merges = self.layout.num_processes > 1 and has_delayed_scales(experiment)
        self._merge = merge_amaxes if merges else None
        self.passes = Passes(self.models, training, self.layout, device)
        self.num_micro_batches = num_micro_batches_each(experiment)
        peak = peak_tflops(device_name(device), training.precision)
        self.peak = peak and peak * torch.distributed.get_world_size()
        length, size = training.seq_length, training.global_batch_size
        self.tokens = size * length
        self.flops = flops_per_iteration(self.model, length, size)

    def set_precision(self, declared: PrecisionMap) -> None:
        """Let every module of this rank quantise as a map of the whole model declares."""
        for chunk in self.chunks:
            own = {name: declared[name] for name in scheme_modules(chunk)}
            set_precision(chunk, own, self.training.attention)

    def gather_parameters(self) -> None:
        """Complete this rank's parameters, which otherwise the next forward pass gathers while it computes."""
        for model in self.models:
            if model.ddp_config.overlap_param_gather:
                model.start_param_sync(force_sync=True)

    def state(self) -> RankState:
        """What this rank writes of the training state besides the published weights."""
        held, rank = held_pieces(self.optimizer, self.parts), torch.distributed.get_rank()
        return RankState(
            written_pieces(held, self.model, self.layout, rank, self.is_distributed),
            self.scheduler.num_steps,
            max((each.steps for each in held.values()), default=0),
            loss_scale_of(self.optimizer),
            self.step_state.state_dict(),
        )

    def _resume(self, start: StartPoint, *, with_state: bool) -> None:
        """Restore the schedule, and the training state or not, from a checkpoint."""
        if not with_state:
            self.scheduler.step(start.iteration)
            return
        index = load_state(start.weights, self.optimizer, self.parts, self.models)
        self.scheduler.step(index.schedule_steps)
        self.nonfinite = index.nonfinite
        self.step_state.load_state_dict(index.amax_histories, self.device)

    def step(
        self,
        iteration: int,
        batches: Iterator[Batch],
        proof: contextlib.AbstractContextManager[None] | None = None,
        *,
        is_complete: bool | None = None,
    ) -> Metrics:
        """Run one step, its passes inside `proof`; None of the training state is proved if `is_complete` is None."""
        start = time.perf_counter()
        scale = float(self.optimizer.get_loss_scale()) if self._is_fp16 else None
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.sums.begin(iteration, is_complete)
        watch = self.rounded.watch(iteration, is_complete)
        with (
            proof or contextlib.nullcontext(),
            self.rounded_reduction(iteration, watch),
            self._keep_weight_copies(several=self.num_micro_batches > 1),
        ):
            self.rounded.begin(self.models, watch)
            own_losses = self.passes.train(
                self._shown(batches, iteration),
                self.num_micro_batches,
                lambda index: self._begin(iteration, index, scale),
            )
        balancing = self._balancing_loss()
        if self.is_distributed and self.observer.needs_gradients(iteration):
            complete_gradients(self.models)
        self.observer.gradients(iteration, scale)
        loss = self.mean_loss(own_losses)
        wait_for_copies(self.device)  # the optimizer changes what they read
        self.scheduler.step(1)
        lr = rate(self.optimizer, is_held=iteration < self._first_free)
        found = self.sums.look()
        around = self.rounded.around_step(iteration, watch) if self.rounded.weights else None
        stepped, grad_norm, wrong = self.updates.step(iteration, scale, is_complete, loss, around)
        if stepped:
            self.rounded.after_step(iteration, watch)
        if watch is not None:  # before the step, which follows from it
            self.observer.outside_products(watch, stepped)
        self.updates.used["aux_loss"] = balancing
        self.observer.updated(iteration, self.updates.used, found + wrong)
        nonfinite = None
        if not stepped:
            self.scheduler.step(-1)  # a step that is left out does not advance the schedule
            nonfinite = cause(self.chunks, [float(each) for each in own_losses])
            if not lowers_scale(scale, loss):
                first = self._first_nonfinite(iteration, forward_only=not math.isfinite(loss))
                nonfinite = "; ".join(filter(None, (nonfinite, first)))
        self.step_state.finish(stepped or scale is not None, self._merge)
        step_time_s = time.perf_counter() - start
        return Metrics(
            iteration=iteration,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=self.tokens,
            step_time_s=step_time_s,
            tokens_per_s=self.tokens / step_time_s,
            tflops=self.flops / step_time_s / 1e12,
            memory_gb=memory_gb(self.device),
            skipped=not stepped,
            nonfinite=nonfinite,
            loss_scale=scale,
            aux_loss=balancing,
            mfu=self.peak and self.flops / step_time_s / 1e12 / self.peak,
        )

    def rounded_reduction(
        self, iteration: int, watch: StateWatch | None
    ) -> contextlib.AbstractContextManager[None]:
        """A context for the passes of an iteration that rounds gradients on their way, if the scheme does."""
        if self.reduction is None:
            return contextlib.nullcontext()
        return self.reduction.of_iteration(iteration, watch)

    def _shown(self, batches: Iterator[Batch], iteration: int) -> Iterator[Batch]:
        """The micro-batches of an iteration; the observer receives the tokens of each."""
        self._seen = []
        for index, batch in enumerate(batches):
            self._seen.append(batch)
            self.observer.tokens(iteration, index, batch["tokens"])
            yield batch

    def _begin(self, iteration: int, index: int, scale: float | None) -> None:
        """The forward or backward pass of this rank's micro-batch `index` begins."""
        self._begin_draws(iteration, index)
        self.observer.micro_batch(iteration, index, scale)

    def _begin_draws(self, iteration: int, index: int) -> None:
        data_rank = parallel_state.get_data_parallel_rank()
        self.step_state.begin(iteration, index * self.layout.data + data_rank)

    def _first_nonfinite(self, iteration: int, *, forward_only: bool) -> str | None:
        """Repeat the passes of the step that was just left out, and find the first tensor that is NaN or Inf.

        None if every tensor is finite then; with `forward_only`, if every output is. Amax histories stay.
        """
        self.observer.evaluation()
        self.step_state.updates_histories = False
        with looking_out(self.chunks, forward_only=forward_only) as lookout:

            def begin(index: int) -> None:
                lookout.micro_batch = index

            self.repeat(iteration, self._seen, begin)
        self.step_state.updates_histories = True
        return first_of_all(lookout)

    def repeat(
        self, iteration: int, batches: Sequence[Batch], begin: Begin = lambda index: None
    ) -> list[Tensor]:
        """Run the passes of an iteration outside of its step; the losses are as of `Passes.train`."""
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

        def begin_both(index: int) -> None:
            begin(index)
            self._begin_draws(iteration, index)

        with self._keep_weight_copies(several=self.num_micro_batches > 1):
            losses = self.passes.train(iter(batches), self.num_micro_batches, begin_both)
        self._balancing_loss()  # which Megatron has added up once more
        return losses

    def mean_loss(self, own_losses: list[Tensor]) -> float:
        """The mean over all micro-batches, on every rank; before the last stage there are no own losses."""
        own = torch.stack(own_losses or [torch.zeros((), device=self.device)]).mean()
        return float(mean_over_data_parallel(sum_over_stages(own)))

    @torch.no_grad()
    def validation_loss(self, held_out: Iterable[Batch]) -> float:
        """The mean loss of all unmasked tokens of held-out samples."""
        self.observer.evaluation()
        self._set_training(False)
        with self._keep_weight_copies(several=True):
            sums = self.passes.evaluate(held_out)
        self._set_training(True)
        total, count = mean_over_data_parallel(sum_over_stages(sums)).tolist()
        return total / count if count else math.nan

    def _set_training(self, is_training: bool) -> None:
        for model in self.models:
            model.train(is_training)
        self.step_state.updates_histories = is_training

    def _keep_weight_copies(self, several: bool) -> contextlib.AbstractContextManager[None]:
        """A context for passes with constant weights that reuses quantised copies, if `training.weight_cache` is on."""
        if not self.training.weight_cache:
            return contextlib.nullcontext()
        return self.copies.step(several, self.training.recompute is Recompute.full)

    def _balancing_loss(self) -> float | None:
        """The mean balancing loss of this iteration's micro-batches; None for a model without one."""
        if (moe := self.model.moe) is None or moe.aux_loss is AuxLoss.none:
            return None
        own = take_balancing_loss(self.device) * moe.aux_loss_coefficient
        own = sum_over_model_parallel(own / self.num_micro_batches)
        return float(mean_over_data_parallel(own))
