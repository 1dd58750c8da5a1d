"""Loads initial weights from a checkpoint or a published model, instead of random initialisation."""

from __future__ import annotations

from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel

from quantexp.config.start_point import StartPoint, start_point
from quantexp.model.checkpoint_hashes import require_intact
from quantexp.model.checkpoints import PADDING, STATE
from quantexp.model.huggingface.fit import fitting_weights
from quantexp.model.huggingface.weights import open_weights
from quantexp.schema import Experiment
from quantexp.training.megatron.published_weights import load_padding, load_weights


def load_initial_weights(gpt: GPTModel, experiment: Experiment) -> StartPoint | None:
    """Load the configured initial weights, if any, into a new model; returns the checkpoint to resume from, or None.

    Raises:
        DataError: weights are missing, damaged or of another model.
    """
    model, start = experiment.model, start_point(experiment)
    if start is not None:
        require_intact(start.weights, () if experiment.training.start_optimizer else (STATE,))
        load_weights(gpt, model, fitting_weights(model, start.weights))
        if start.padding.is_file():
            load_padding(gpt, model, open_weights(start.padding))
    elif model.init_from is not None:
        require_intact(Path(model.init_from).expanduser(), (STATE, PADDING))
        load_weights(gpt, model, fitting_weights(model))
    return start
