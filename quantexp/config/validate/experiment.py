"""Ranges and combinations of an experiment's keys. Each message names full key, value and allowed values."""

from __future__ import annotations

import math
import re

from quantexp.capture.names import RESIDUAL, ROUTER
from quantexp.capture.select.rules import check_capture_rules
from quantexp.capture.select.schedule import check_schedule, ends_by_itself
from quantexp.config.evaluation import check_evaluation
from quantexp.config.validate.data import validate_data
from quantexp.config.validate.launcher import validate_launcher
from quantexp.config.validate.model import validate_model
from quantexp.config.validate.tracking import validate_tracking
from quantexp.errors import ConfigError
from quantexp.model.checkpoints import check_checkpoint, check_start
from quantexp.quant.attention.fusable import require_fused_attention
from quantexp.quant.precision import (
    changes,
    check_rules,
    decoder_modules,
    precision_map,
)
from quantexp.quant.scoring import scored_operand
from quantexp.quant.slots import resolve_site, site_configs
from quantexp.schema import (
    AnalysisConfig,
    AttentionPath,
    CaptureConfig,
    Experiment,
    LrSchedule,
    ModelConfig,
    TrainingConfig,
)
from quantexp.schema.ranges import at_least, not_negative, positive

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+~-]*")


def validate(experiment: Experiment) -> None:
    """Refuse an experiment that cannot run.

    Raises:
        ConfigError: names the first invalid key.
    """
    validate_model(experiment.model)
    _training(experiment.training)
    check_start(experiment)
    check_evaluation(experiment)
    check_checkpoint(experiment.checkpoint, experiment.training.iterations)
    _capture(experiment.capture, experiment.model, experiment.training.iterations)
    validate_data(experiment.dataset)
    _names(experiment)
    _fits(experiment)
    _scheme(experiment)
    validate_launcher(experiment)
    validate_tracking(experiment.tracking)
    _analysis(experiment.analysis)


def _analysis(analysis: AnalysisConfig) -> None:
    try:
        _ = analysis.drawing
    except ValueError as error:
        raise ConfigError(
            "analysis.auto must be quick (one picture), true (all figures) or false (none), got "
            f"{analysis.auto!r}"
        ) from error


def _training(training: TrainingConfig) -> None:
    for key in ("seq_length", "micro_batch_size", "global_batch_size", "iterations"):
        at_least(f"training.{key}", getattr(training, key), 1)
    at_least("training.max_nonfinite_iterations", training.max_nonfinite_iterations, 1)
    at_least("training.warmup_iterations", training.warmup_iterations, 0)
    at_least("training.seed", training.seed, 0)
    if training.warmup_iterations >= training.iterations:
        raise ConfigError(
            f"training.warmup_iterations must be less than training.iterations={training.iterations}, "
            f"got {training.warmup_iterations}"
        )
    if training.global_batch_size % training.micro_batch_size:
        raise ConfigError(
            "training.global_batch_size must be a multiple of training.micro_batch_size="
            f"{training.micro_batch_size}, got {training.global_batch_size}"
        )
    _decay(training)
    positive("training.lr", training.lr)
    for key in ("min_lr", "weight_decay", "clip_grad"):
        not_negative(f"training.{key}", getattr(training, key))
    if training.min_lr > training.lr:
        raise ConfigError(
            f"training.min_lr must be at most training.lr={training.lr}, got {training.min_lr}"
        )
    for key in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(training, key) < 1:
            raise ConfigError(f"training.{key} must lie in [0, 1), got {getattr(training, key)}")
    positive("training.adam_eps", training.adam_eps)
    scale = training.initial_loss_scale
    if not (scale >= 1 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5):
        raise ConfigError(
            f"training.initial_loss_scale must be a power of two of at least 1, got {scale}"
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
            f"training.lr_schedule=wsd, got {decay}"
        )


def _capture(capture: CaptureConfig, model: ModelConfig, iterations: int) -> None:
    check_schedule(capture, iterations)
    at_least("capture.collect_micro_batches", capture.collect_micro_batches, 0)
    modules = list(dict.fromkeys(module.name for module, _ in decoder_modules(model)))
    routers = [] if model.moe is None else [ROUTER]
    check_capture_rules(capture, model.num_layers, [*modules, RESIDUAL, *routers])
    if capture.router_logits and model.moe is None:
        raise ConfigError(
            f"capture.router_logits needs a model with experts (model.moe), and {model.name} has none"
        )
    positive("capture.queue_gb", capture.queue_gb)
    if capture.max_gb is not None:
        not_negative("capture.max_gb", capture.max_gb)
    if capture.format is not None:
        scored_operand(capture.format)
    if capture.stop_after_capture and not ends_by_itself(capture):
        raise ConfigError(
            "capture.stop_after_capture needs something that ends: capture=tensors or capture=stats, and "
            "capture.control_iter of at least 1 or capture.iterations"
        )


def _names(experiment: Experiment) -> None:
    names = {
        "model.name": experiment.model.name,
        "dataset.name": experiment.dataset.name,
        "quant.name": experiment.quant.name,
    }
    for key, name in names.items():
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(
                f"{key} must be letters, digits and . _ + ~ - (it names a folder), got {name!r}"
            )


def _fits(experiment: Experiment) -> None:
    model, training = experiment.model, experiment.training
    if training.seq_length > model.max_sequence_length:
        raise ConfigError(
            "training.seq_length must be at most model.max_sequence_length="
            f"{model.max_sequence_length}, got {training.seq_length}"
        )


def _scheme(experiment: Experiment) -> None:
    quant = experiment.quant
    for site, config in site_configs(quant).items():
        resolve_site(site, config)  # checks the site's own keys first, so that messages name them
    check_rules(experiment.model, quant)
    for iteration in changes(quant):
        precision_map(experiment.model, quant, iteration)
    if experiment.training.attention is AttentionPath.fused:
        require_fused_attention(experiment.model, quant)
