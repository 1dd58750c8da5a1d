"""A small model as training builds it, and the loss of one micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from quantexp.quant.precision import precision_map
from quantexp.quant.step_state import StepState, use_step_state
from quantexp.schema import Experiment, Precision, TrainingConfig
from quantexp.training.megatron.model import build_model, set_precision
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import inject, stock_spec
from tests.training.megatron.whole_models import draw


@contextlib.contextmanager
def model_of(experiment: Experiment) -> Iterator[GPTModel]:
    """The model with its scheme, inside a session."""
    training = experiment.training
    with session(training), use_step_state(StepState(1)):
        model, _ = build_model(experiment.model, training, inject(stock_spec(experiment.model)))
        draw(model, experiment.model)
        if training.precision is not Precision.fp32:
            model = model.bfloat16()
        declared = precision_map(experiment.model, experiment.quant)
        set_precision(model, declared, training.attention)
        yield model


def losses_of(model: GPTModel, training: TrainingConfig) -> Tensor:
    """The loss of each of a micro-batch's tokens."""
    T, B = training.seq_length, training.micro_batch_size
    ids = torch.randint(256, (B, T), generator=torch.Generator().manual_seed(1))
    losses: Tensor = model(ids, torch.arange(T).expand(B, T), None, labels=ids)
    return losses
