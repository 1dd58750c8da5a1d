"""The training loop, on Megatron-Core's model, optimizer, scheduler and pipeline schedule.

The proof of engagement watches the forward and backward passes, completely in the first iteration and whenever a rule
changes the precision map, in drawn parts otherwise; the optimizer steps only if they match the declaration. The loop
reports its events to an `Observer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from quantexp.config.evaluation import is_evaluated
from quantexp.config.start_point import StartPoint, first_iteration
from quantexp.errors import RunError
from quantexp.model.checkpoints import is_saved
from quantexp.model.finite import count_words, first_nonfinite
from quantexp.model.shards import global_name
from quantexp.proof.draws import Moment
from quantexp.proof.master_weights import proved_again
from quantexp.quant.precision import PrecisionMap, precision_map, unquantised
from quantexp.quant.rules import Conditions, changes
from quantexp.runs.metrics import Metrics, is_fault, lines_before
from quantexp.schema import Experiment, Nonfinite, TrainingConfig
from quantexp.training.megatron.callbacks import Observer, Saver
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.experts import first_expert
from quantexp.training.megatron.model import first_layer, scheme_spec
from quantexp.training.megatron.numerics_state import use_numerics
from quantexp.training.megatron.passes import Batch
from quantexp.training.megatron.step import Spec, Stepper
from quantexp.training.requests import Request

#: The largest whole loss whose exponential a float64 can represent.
_MAX_EXP_LOSS = 709.0
#: Called with the model, the metrics of the step and the map that it declared, by which it must leave the model.
Measure = Callable[[Stepper, Metrics, PrecisionMap], None]


def train(
    experiment: Experiment,
    batches: Iterator[Batch],
    observer: Observer,
    device: torch.device,
    layer_spec: Spec | None = None,
    saver: Saver | None = None,
    held_out: Callable[[], Iterable[Batch]] | None = None,
    start: StartPoint | None = None,
    measure: Measure | None = None,
) -> None:
    """Train as configured; call inside `session`.

    Args:
        experiment: the complete configuration.
        batches: micro-batches from `quantexp.training.megatron.data_loader.batches`.
        observer: receives the loop's events.
        device: the model's device.
        layer_spec: replaces the stock decoder with the scheme injected (for tests and peers).
        saver: saves the configured checkpoints.
        held_out: returns a new iterator over this rank's evaluation micro-batches.
        start: the run's own checkpoint, from which it goes on; None begins at its first iteration.
        measure: called after each step.

    Raises:
        KeyboardInterrupt: a request ended the run; its checkpoint is whole.
        RunError: the loss or gradient was not finite in too many consecutive iterations, or the last step left a
            weight that is not finite.
        DataError: the initial weights do not fit the model.
    """
    with use_numerics(experiment, weights_once=experiment.training.weight_cache) as state:
        spec = layer_spec or scheme_spec(experiment.model, experiment.quant.backend)
        stepper = Stepper(experiment, spec, device, observer, state, start)
        is_stock = layer_spec is None
        _train(experiment, batches, observer, stepper, is_stock, saver, held_out, start, measure)


def _train(
    experiment: Experiment,
    batches: Iterator[Batch],
    observer: Observer,
    stepper: Stepper,
    is_stock: bool,
    saver: Saver | None,
    held_out: Callable[[], Iterable[Batch]] | None,
    start: StartPoint | None,
    measure: Measure | None,
) -> None:
    observer.built(stepper.chunks)
    starts = {
        *changes(experiment.quant),
        *proved_again(experiment.quant, experiment.training.iterations),
    }
    nonfinite = stepper.nonfinite
    first, last = first_iteration(experiment, start), experiment.training.last_iteration
    conditions = Conditions(
        experiment.quant, [] if start is None else lines_before(start.run, first)
    )
    switched = False
    for iteration in range(first, last + 1):
        changed = iteration in starts or iteration == first or switched
        if changed:
            declared = precision_map(experiment.model, experiment.quant, iteration)
            if is_stock:
                stepper.set_precision(declared)
        is_complete = changed or observer.unproved
        proof = observer.proof(iteration, declared, is_complete=is_complete)
        metrics = stepper.step(iteration, batches, proof, is_complete=is_complete)
        if held_out is not None and is_evaluated(experiment, iteration):
            metrics = _evaluated(experiment, stepper, observer, declared, metrics, held_out)
        if measure is not None:
            measure(stepper, metrics, declared)
        met = conditions.see(asdict(metrics))
        if switched := bool(met):
            metrics = replace(metrics, switched=met)
        nonfinite = nonfinite + 1 if is_fault(asdict(metrics)) else 0
        continues = observer.iteration(metrics)
        if nonfinite:
            _stop_if_configured(experiment.training, metrics, nonfinite)
        ends = iteration == last or not continues
        request = observer.request()
        saves = is_saved(experiment.checkpoint, iteration, ends) or request is not Request.NONE
        if ends or saves:
            stepper.gather_parameters()
        if ends:
            if saver is not None:
                saver.finish()  # the error of an earlier checkpoint comes first
            _require_finite_weights(stepper.chunks, iteration)
        if saver is not None and saves:
            saver.save(iteration, stepper.chunks, stepper.state, nonfinite, stepper.updates.saved)
        if saver is not None and (ends or request.ends):
            saver.finish()
        if request.ends and not ends:
            raise KeyboardInterrupt
        if not continues:
            return


def _evaluated(
    experiment: Experiment,
    stepper: Stepper,
    observer: Observer,
    declared: PrecisionMap,
    metrics: Metrics,
    held_out: Callable[[], Iterable[Batch]],
) -> Metrics:
    """The metrics with the loss of held-out samples, and with that of the same weights unquantised if configured."""
    iteration = metrics.iteration
    updates = stepper.updates
    first = Moment(experiment.training.seed, iteration).choice("sent in an evaluation").random()
    sends = stepper.sums.sends
    with observer.proof_of_evaluation(iteration, declared), sends.evaluating(first) as wrong:
        loss = stepper.validation_loss(updates.evaluating(held_out()))
    observer.evaluated(iteration, loss, updates.found_in_evaluation + wrong)
    perplexity = math.exp(loss) if loss < _MAX_EXP_LOSS else math.inf
    metrics = replace(metrics, validation_loss=loss, perplexity=perplexity)
    if not experiment.evaluation.unquantised:
        return metrics
    high = unquantised(declared)
    stepper.set_precision(high)
    proof = observer.proof_of_evaluation(iteration, high, quantised=False)
    with proof, sends.evaluating(first) as wrong:
        loss = stepper.validation_loss(updates.evaluating(held_out()))
        metrics = replace(metrics, unquantised_loss=loss)
    observer.evaluated(iteration, loss, updates.found_in_evaluation + wrong)
    stepper.set_precision(declared)
    return metrics


def _stop_if_configured(training: TrainingConfig, metrics: Metrics, in_a_row: int) -> None:
    """End the run after too many steps in a row that were left out.

    Raises:
        RunError: names what was not finite in the last of them.
    """
    if training.nonfinite is Nonfinite.stop:
        raise RunError(
            f"stopped at iteration {metrics.iteration}: {metrics.nonfinite} (training.nonfinite=stop)"
        )
    if in_a_row >= training.max_nonfinite_iterations:
        raise RunError(
            f"stopped at iteration {metrics.iteration}: loss {metrics.loss}, gradient norm {metrics.grad_norm} in "
            f"{in_a_row} iterations in a row (training.max_nonfinite_iterations); {metrics.nonfinite}"
        )


def _require_finite_weights(chunks: list[GPTModel], iteration: int) -> None:
    """Refuse to complete a run with weights that no later step has checked; every rank calls this.

    Raises:
        RunError: names the first weight.
    """
    problems = [words for words in gather(_nonfinite_weight(chunks)) if words is not None]
    if problems:
        raise RunError(
            f"after iteration {iteration}, {problems[0]}: lower training.lr, or set training.clip_grad"
        )


def _nonfinite_weight(chunks: list[GPTModel]) -> str | None:
    """The first weight of this rank's parts of the model with an element that is NaN or Inf, in words."""
    for chunk in chunks:
        if (first := first_nonfinite(chunk.named_parameters())) is not None:
            name, weight = first
            shown = global_name(name, first_layer(chunk), first_expert(chunk))
            return f"{count_words(weight)} in {shown}"
    return None
