"""Combinations of an experiment's keys. Each message names full key, value and allowed values."""

from __future__ import annotations

from quantexp.capture.select.schedule import check_schedule, ends_by_itself
from quantexp.config.evaluation import check_evaluation
from quantexp.config.validate.data import validate_data
from quantexp.config.validate.model import validate_model
from quantexp.config.validate.parallel import validate_launcher, validate_parallel
from quantexp.config.validate.tracking import validate_statistics, validate_tracking
from quantexp.errors import ConfigError
from quantexp.model.decoder import FINAL_NORM, OUTPUT, norm_widths
from quantexp.model.layout import Layout
from quantexp.quant.outside_products import check_outside_products
from quantexp.quant.precision import (
    check_rules,
    declared_maps,
    decoder_modules,
    quantises_norms,
    quantises_output,
)
from quantexp.quant.slots import declared_formats, resolve_site, site_configs
from quantexp.schema import (
    AttentionPath,
    Backend,
    CaptureLayout,
    CheckpointConfig,
    Experiment,
    GradientConfig,
    LrSchedule,
    Measure,
    Optimizer,
    TrainingConfig,
    TriggerConfig,
)
from quantexp.schema.limits import check_limits, next_multiple

#: Rules times modules.
_MOST_TRIALS = 1_000_000


def validate(experiment: Experiment) -> None:
    """Refuse an experiment that cannot run.

    Raises:
        ConfigError: names the first invalid key.
    """
    _extras(experiment)
    validate_model(experiment.model)
    check_limits("training", experiment.training)
    _training(experiment.training)
    validate_parallel(experiment)
    _start(experiment)
    _stop_after(experiment)
    if experiment.gradient != GradientConfig():
        from quantexp.config.gradient import check_gradient

        check_gradient(experiment)
    check_evaluation(experiment)
    _checkpoint(experiment.checkpoint, experiment.training.iterations)
    check_limits("capture", experiment.capture)
    _count_rules(experiment)
    _capture(experiment)
    validate_data(experiment.dataset)
    _fits(experiment)
    check_limits("quant", experiment.quant)
    _scheme(experiment)
    _backend(experiment)
    if experiment.model.moe is not None:
        from quantexp.quant.alignment import check_parts

        check_parts(experiment)
    if not Layout.of(experiment).is_whole:
        from quantexp.quant.alignment import check_alignment

        check_alignment(experiment)
    validate_launcher(experiment)
    validate_tracking(experiment.tracking)
    validate_statistics(experiment)
    check_limits("analysis", experiment.analysis)


def _extras(experiment: Experiment) -> None:
    """Refuse keys of an extra that is not installed."""
    ring, backend = experiment.capture.ring, experiment.quant.backend
    for extra, asked, is_set in (
        ("transformer_engine", f"quant.backend={backend.value}", backend is not Backend.emulated),
        ("evaluate", "evaluate.only=true", experiment.evaluate.only),
        ("bisect", "gradient.only=true", experiment.gradient.only),
        ("forensics", f"capture.ring={ring}", ring is not None),
    ):
        if is_set:
            from quantexp.extra import require_extra

            require_extra(extra, asked)


def _backend(experiment: Experiment) -> None:
    """Refuse what the scheme's backend cannot run, and a recipe without an effect."""
    quant = experiment.quant
    if quant.backend is not Backend.emulated:
        asked = f"quant.backend={quant.backend.value}"
    elif quant.recipe is not None:
        asked = f"quant.recipe={quant.recipe.value}"
    else:
        return
    from quantexp.extra import Service, required

    required(Service.BACKEND_CHECK, asked)(experiment)


def _count_rules(experiment: Experiment) -> None:
    """Refuse more rules than a plan can try on every module."""
    moe = experiment.model.moe
    modules = experiment.model.num_layers * (1 if moe is None else moe.num_experts)
    for key, rules in (
        ("quant.rules", experiment.quant.rules),
        ("capture.rules", experiment.capture.rules),
    ):
        if len(rules) * modules > _MOST_TRIALS:
            raise ConfigError(
                f"{key} times the layers and experts of the model must be at most {_MOST_TRIALS:,}, got "
                f"{len(rules):,} x {modules:,}"
            )


def _training(training: TrainingConfig) -> None:
    if training.warmup_iterations >= training.iterations:
        raise ConfigError(
            f"training.warmup_iterations must be less than training.iterations={training.iterations}, "
            f"got {training.warmup_iterations}; take training.warmup_iterations={training.iterations // 10}"
        )
    if training.global_batch_size % training.micro_batch_size:
        multiple = next_multiple(training.global_batch_size, training.micro_batch_size)
        raise ConfigError(
            "training.global_batch_size must be a multiple of training.micro_batch_size="
            f"{training.micro_batch_size}, got {training.global_batch_size}; take training.global_batch_size={multiple}"
        )
    _decay(training)
    _optimizer(training)
    if training.min_lr > training.lr:
        raise ConfigError(
            f"training.min_lr must be at most training.lr={training.lr}, got {training.min_lr}; take "
            f"training.min_lr={training.lr / 10:.3g}"
        )


def _optimizer(training: TrainingConfig) -> None:
    """Refuse what Muon cannot do, and its key without it."""
    if training.optimizer is Optimizer.muon:
        if training.distributed_optimizer:
            raise ConfigError(
                "training.distributed_optimizer=true divides the optimizer's state by elements, and "
                "training.optimizer=muon orthogonalises whole matrices; drop it"
            )
    elif training.muon_momentum != TrainingConfig.muon_momentum:
        raise ConfigError(
            f"training.muon_momentum is for training.optimizer=muon, got {training.muon_momentum} with "
            f"{training.optimizer.value}"
        )


def _start(experiment: Experiment) -> None:
    """Refuse contradictory keys of the first weights."""
    training = experiment.training
    if training.start_from is None:
        if training.start_optimizer:
            raise ConfigError("training.start_optimizer needs training.start_from=RUN@ITERATION")
        return
    if experiment.model.init_from is not None:
        raise ConfigError(
            f"training.start_from={training.start_from} and model.init_from={experiment.model.init_from} both give the "
            "first weights; drop one of them"
        )
    if (first := experiment.first_iteration) > training.iterations:
        raise ConfigError(
            f"training.start_from={training.start_from} begins with iteration {first}, and training.iterations is "
            f"{training.iterations}"
        )


def _stop_after(experiment: Experiment) -> None:
    """Refuse an end, or held iterations, that leave nothing to train."""
    training, first = experiment.training, experiment.first_iteration
    stop, held, number = (
        training.stop_after,
        training.held_iterations,
        training.iterations - first + 1,
    )
    if held >= number:
        raise ConfigError(
            f"training.held_iterations must be less than the {number} iterations of the run, got {held}"
        )
    if stop is not None and not first <= stop <= training.iterations:
        raise ConfigError(
            f"training.stop_after must lie between {first}, the first iteration, and training.iterations="
            f"{training.iterations}, got {stop}"
        )


def _decay(training: TrainingConfig) -> None:
    decay, stable = training.decay_iterations, training.iterations - training.warmup_iterations
    if training.lr_schedule is not LrSchedule.wsd:
        if decay is not None:
            raise ConfigError(
                f"training.decay_iterations is for training.lr_schedule=wsd, got {decay} with "
                f"{training.lr_schedule.value}"
            )
    elif decay is None or not 1 <= decay <= stable:
        raise ConfigError(
            f"training.decay_iterations must lie between 1 and {stable} (all but the warm-up) with "
            f"training.lr_schedule=wsd, got {decay}; take training.decay_iterations={max(1, stable // 5)}"
        )


def _checkpoint(checkpoint: CheckpointConfig, iterations: int) -> None:
    """Refuse intervals that save nothing, and keys that do nothing."""
    check_limits("checkpoint", checkpoint)
    if checkpoint.keep_every is not None and checkpoint.keep_last is None:
        raise ConfigError(
            f"checkpoint.keep_every={checkpoint.keep_every} needs checkpoint.keep_last=N: without it all stay"
        )
    if not checkpoint.publish and not checkpoint.optimizer:
        raise ConfigError(
            "checkpoint.publish=false needs checkpoint.optimizer=true: a checkpoint without both has no weights"
        )
    if checkpoint.every is None:
        if checkpoint.optimizer and not checkpoint.at_end and checkpoint.every_min is None:
            raise ConfigError(
                "checkpoint.optimizer needs checkpoints to be kept in: checkpoint.every=N, checkpoint.every_min=N or "
                "checkpoint.at_end=true"
            )
        return
    if checkpoint.every > iterations:
        raise ConfigError(
            f"checkpoint.every must be at most training.iterations={iterations}, got {checkpoint.every}; "
            "checkpoint.at_end=true saves the last iteration's"
        )


def _capture(experiment: Experiment) -> None:
    capture, model = experiment.capture, experiment.model
    check_schedule(capture, experiment.training.last_iteration)
    if capture.rules or capture.layout is not CaptureLayout.by_run:
        _capture_rules(experiment)
    if capture.router_logits and model.moe is None:
        raise ConfigError(
            f"capture.router_logits needs a model with experts (model.moe), and {model.name} has none"
        )
    if capture.ring is None and capture.trigger != TriggerConfig():
        raise ConfigError(
            "capture.trigger needs capture.ring=N, the statistics that it writes; add it, or drop the trigger"
        )
    if capture.format is not None:
        from quantexp.quant.scoring import scored_spec

        scored_spec(capture.format, declared_formats(experiment.quant))
    if capture.stop_after_capture and not ends_by_itself(capture):
        raise ConfigError(
            "capture.stop_after_capture needs something that ends: capture=tensors or capture=stats, and "
            "capture.control_iter of at least 1 or capture.iterations"
        )


def _capture_rules(experiment: Experiment) -> None:
    from quantexp.capture.names import RESIDUAL, ROUTER
    from quantexp.capture.select.rules import check_capture_rules, check_layout

    capture, model = experiment.capture, experiment.model
    check_layout(capture)
    modules = list(dict.fromkeys(module.name for module, _ in decoder_modules(model)))
    routers = [] if model.moe is None else [ROUTER]
    output = [OUTPUT] if quantises_output(experiment.quant) else []
    norms = [*norm_widths(model), FINAL_NORM] if quantises_norms(experiment.quant) else []
    known = [*modules, *norms, *output, RESIDUAL, *routers]
    check_capture_rules(capture, model.num_layers, known)


def _fits(experiment: Experiment) -> None:
    model, training = experiment.model, experiment.training
    if training.seq_length > model.max_sequence_length:
        raise ConfigError(
            "training.seq_length must be at most model.max_sequence_length="
            f"{model.max_sequence_length}, got {training.seq_length}"
        )
    if model.sliding_window is not None and training.seq_length > model.sliding_window:
        raise ConfigError(
            f"training.seq_length must be at most model.sliding_window={model.sliding_window}, beyond which the model "
            f"would need windowed attention, which is not built, got {training.seq_length}"
        )


def _scheme(experiment: Experiment) -> None:
    quant = experiment.quant
    declared = declared_formats(quant)
    for site, config in site_configs(quant).items():
        resolve_site(
            site, config, declared=declared
        )  # checks the site's own keys first, so that messages name them
    check_rules(experiment.model, quant)
    check_outside_products(experiment)
    _conditions(experiment)
    declared_maps(experiment.model, quant)
    if experiment.training.attention is AttentionPath.fused:
        from quantexp.quant.attention.fusable import require_fused_attention

        require_fused_attention(experiment.model, quant)


def _conditions(experiment: Experiment) -> None:
    """Refuse conditions on what the run does not measure."""
    for index, rule in enumerate(experiment.quant.rules):
        where = f"quant.rules[{index}].when"
        if rule.when is None:
            continue
        if experiment.evaluate.only:
            raise ConfigError(
                f"{where} looks at the metrics of a training, and an evaluation has none: give the rule iterations, or "
                "drop it"
            )
        if rule.when.measure is Measure.validation_loss and experiment.evaluation.every is None:
            raise ConfigError(f"{where}.measure=validation_loss needs evaluation.every=N")
