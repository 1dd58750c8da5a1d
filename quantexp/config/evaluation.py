"""The evaluation of held-out samples: during training, and instead of it (`evaluate.only`, `quantexp evaluate`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantexp.errors import ConfigError
from quantexp.model.layout import Layout
from quantexp.quant.precision import PrecisionMap, declared_maps, forward_only, precision_map
from quantexp.schema import CaptureLevel, EvaluateConfig, Experiment, LrSchedule
from quantexp.schema.limits import check_limits, next_multiple
from quantexp.schema.training import run_and_iteration


def check_evaluation(experiment: Experiment) -> None:
    """Refuse an evaluation that never happens, or whose samples cannot be divided among the data-parallel ranks.

    Raises:
        ConfigError: names key, value and bound.
    """
    evaluation, training = experiment.evaluation, experiment.training
    _check_evaluate(experiment)
    if evaluation.unquantised and evaluation.every is None:
        raise ConfigError(
            "evaluation.unquantised needs evaluation.every=N; quantexp evaluate always evaluates in bf16, too"
        )
    if evaluation.every is None and not experiment.evaluate.only:
        return
    check_limits("evaluation", evaluation)
    layout = Layout.of(experiment)
    divisor = training.micro_batch_size * layout.micro_batches_together
    if evaluation.samples % divisor:
        raise ConfigError(
            f"evaluation.samples must be a multiple of {divisor} (training.micro_batch_size x "
            f"{layout.micro_batches_in_words}), got {evaluation.samples}; take evaluation.samples="
            f"{next_multiple(evaluation.samples, divisor)}"
        )


def _check_evaluate(experiment: Experiment) -> None:
    """Refuse keys without an effect, and an evaluation without weights."""
    evaluate, training = experiment.evaluate, experiment.training
    check_limits("evaluate", evaluate)
    _check_tasks(experiment)
    if not evaluate.only:
        for key in ("each_layer", "each_module", "tasks"):
            if getattr(evaluate, key):
                raise ConfigError(
                    f"evaluate.{key} belongs to quantexp evaluate, and this run trains"
                )
        return
    if training.start_from is None and experiment.model.init_from is None:
        raise ConfigError(
            "quantexp evaluate needs weights: RUN@ITERATION or model.init_from=FOLDER"
        )
    optimizer = ["training.start_optimizer=true"] if training.start_optimizer else []
    for setting in (*settings_of_training(experiment), *optimizer):
        raise ConfigError(
            f"{setting} has no effect on quantexp evaluate, which trains nothing: drop it"
        )


def _check_tasks(experiment: Experiment) -> None:
    """Refuse tasks that cannot run, and keys of tasks without a task."""
    evaluate = experiment.evaluate
    if evaluate.tasks:
        from quantexp.config.tasks import check_tasks

        check_tasks(experiment)
        return
    for key in ("task_folder", "limit", "fewshot", "score_template"):
        if (value := getattr(evaluate, key)) != getattr(EvaluateConfig, key):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"evaluate.{key}={shown} has no effect without tasks: add tasks=NAME, or drop it"
            )


def settings_of_training(experiment: Experiment) -> list[str]:
    """The settings, as `key=value`, that have no effect on a run that trains nothing."""
    capture, checkpoint = experiment.capture, experiment.checkpoint
    values = {
        "capture": capture.level is not CaptureLevel.off and capture.name,
        "capture.ring": capture.ring,
        "evaluation.every": experiment.evaluation.every,
        "checkpoint.every": checkpoint.every,
        "checkpoint.every_min": checkpoint.every_min,
        "checkpoint.at_end": checkpoint.at_end and "true",
    }
    return [f"{key}={value}" for key, value in values.items() if value]


def evaluated_only(experiment: Experiment) -> Experiment:
    """The experiment as it runs; an evaluation without training has an iteration for each group of micro-batches.

    A group is what the ranks work on together: one micro-batch for each share of the data, or as many as the pipeline
    has stages. The schedule of the training has no meaning and becomes the simplest one.
    """
    if not experiment.evaluate.only:
        return experiment
    training = experiment.training
    group = training.micro_batch_size * Layout.of(experiment).micro_batches_together
    schedule = replace(
        training,
        iterations=max(1, experiment.evaluation.samples // group),
        stop_after=None,
        global_batch_size=group,
        lr_schedule=LrSchedule.constant,
        warmup_iterations=0,
        decay_iterations=None,
    )
    return replace(experiment, training=schedule)


def map_iteration(experiment: Experiment) -> int:
    """The iteration, from 1, whose precision map an evaluation without training uses: that of the checkpoint."""
    start = experiment.training.start_from
    return 1 if start is None else max(1, run_and_iteration(start)[1])


def maps_of(experiment: Experiment) -> list[PrecisionMap]:
    """Every precision map of a run; of an evaluation without training one, with the forward slots."""
    if not experiment.evaluate.only:
        return declared_maps(experiment.model, experiment.quant)
    iteration = map_iteration(experiment)
    return [forward_only(precision_map(experiment.model, experiment.quant, iteration))]


def num_passes(experiment: Experiment) -> int:
    """The forward passes of each sample in an evaluation without training: bf16, the scheme, and each part alone."""
    (declared,) = maps_of(experiment)
    return 1 + len(parts_evaluated(experiment, declared))


@dataclass(frozen=True)
class Part:
    """What is quantised in one map; without layer everything that the scheme quantises."""

    layer: int | None = None
    module: str | None = None


def parts_evaluated(experiment: Experiment, declared: PrecisionMap) -> list[Part]:
    """The whole scheme, then each layer and each module that it quantises, as configured.

    The output layer and a tied embedding, which are no layers, are modules of both.
    """
    each_layer, each_module = experiment.evaluate.each_layer, experiment.evaluate.each_module
    quantised = [name for name, module in forward_only(declared).items() if module.is_quantised]
    decoder = [name for name in quantised if name.layer < experiment.model.num_layers]
    beside = quantised[len(decoder) :]  # they come last
    layers = [Part(layer) for layer in dict.fromkeys(name.layer for name in decoder)]
    modules = decoder * each_module + beside * (each_layer or each_module)
    return [Part(), *layers * each_layer, *(Part(name.layer, name.name) for name in modules)]


def num_samples(experiment: Experiment) -> int:
    """The number of held-out samples that a run needs."""
    evaluation = experiment.evaluation
    is_used = evaluation.every is not None or experiment.evaluate.only
    return evaluation.samples if is_used else 0


def is_evaluated(experiment: Experiment, iteration: int) -> bool:
    """Whether the run evaluates held-out samples after this iteration, from 1."""
    every = experiment.evaluation.every
    is_last = iteration == experiment.training.last_iteration
    return every is not None and (iteration % every == 0 or is_last)


def num_evaluations(experiment: Experiment, first: int) -> int:
    """The number of iterations from `first` to the last for which `is_evaluated` is true, computed in closed form."""
    every, last = experiment.evaluation.every, experiment.training.last_iteration
    if every is None or first > last:
        return 0
    return last // every - (first - 1) // every + (last % every != 0)
