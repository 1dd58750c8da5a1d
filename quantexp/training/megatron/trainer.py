"""The training loop, on Megatron-Core's model, optimizer, scheduler and pipeline schedule.

In the first iteration, and whenever a rule changes the precision map, the proof of engagement watches the forward and
backward passes; the optimizer steps only if they match the declaration. The loop reports its events to an `Observer`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import torch

from quantexp.config.evaluation import is_evaluated
from quantexp.errors import RunError
from quantexp.model.checkpoints import first_iteration
from quantexp.quant.precision import changes, precision_map
from quantexp.quant.step_state import StepState, use_step_state
from quantexp.schema import Experiment
from quantexp.training.megatron.callbacks import Observer, Saver
from quantexp.training.megatron.model import set_precision
from quantexp.training.megatron.specs import inject, stock_spec
from quantexp.training.megatron.step import Batch, Spec, Stepper


def train(
    experiment: Experiment,
    batches: Iterator[Batch],
    observer: Observer,
    device: torch.device,
    layer_spec: Spec | None = None,
    saver: Saver | None = None,
    held_out: Callable[[], Iterable[Batch]] | None = None,
) -> None:
    """Train as configured; call inside `session`.

    Args:
        experiment: the complete configuration.
        batches: micro-batches from `quantexp.training.megatron.data_loader.batches`.
        observer: receives the loop's events.
        device: the model's device.
        layer_spec: replaces the stock decoder with the scheme injected (for tests and peers).
        saver: called after every iteration.
        held_out: returns a new iterator over this rank's evaluation micro-batches.

    Raises:
        RunError: the loss or gradient was not finite in too many consecutive iterations.
        DataError: the initial weights do not fit the model.
    """
    training = experiment.training
    with use_step_state(StepState(training.seed, weights_once=training.weight_cache)) as state:
        _train(experiment, batches, observer, device, layer_spec, state, saver, held_out)


def _train(
    experiment: Experiment,
    batches: Iterator[Batch],
    observer: Observer,
    device: torch.device,
    layer_spec: Spec | None,
    state: StepState,
    saver: Saver | None,
    held_out: Callable[[], Iterable[Batch]] | None,
) -> None:
    spec = layer_spec or inject(stock_spec(experiment.model))
    stepper = Stepper(experiment, spec, device, observer, state)
    observer.built(stepper.gpt)
    starts = changes(experiment.quant)
    nonfinite = 0
    first, last = first_iteration(experiment), experiment.training.iterations
    for iteration in range(first, last + 1):
        changed = iteration in starts or iteration == first
        if changed:
            declared = precision_map(experiment.model, experiment.quant, iteration)
            if layer_spec is None:
                set_precision(stepper.gpt, declared, experiment.training.attention)
        proof: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if changed or observer.unproved:
            proof = observer.proof(iteration, declared)
        metrics = stepper.step(iteration, batches, proof)
        if held_out is not None and is_evaluated(experiment, iteration):
            metrics = stepper.evaluate(metrics, held_out())
        finite = math.isfinite(metrics.loss) and (
            metrics.skipped or math.isfinite(metrics.grad_norm)
        )
        nonfinite = 0 if finite else nonfinite + 1
        continues = observer.iteration(metrics)
        if nonfinite >= experiment.training.max_nonfinite_iterations:
            raise RunError(
                f"stopped at iteration {iteration}: loss {metrics.loss}, gradient norm {metrics.grad_norm} in "
                f"{nonfinite} iterations in a row (training.max_nonfinite_iterations)"
            )
        if saver is not None:
            saver(iteration, iteration == last or not continues, stepper.gpt, stepper.state)
        if not continues:
            return
