"""Converts between published weights and the parameters of a Megatron model.

Loading fills each parameter in place, rounded to nearest in the working dtype; besides the model, memory holds one part
of a parameter at a time. The reverse direction gathers one published tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from quantexp.config.start_point import StartPoint, start_point
from quantexp.folders import user_path
from quantexp.model.checkpoint_hashes import require_intact
from quantexp.model.checkpoints import PADDING, STATE
from quantexp.model.huggingface.fit import fitting_weights
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.huggingface.weights import Weights, open_weights, read_rows
from quantexp.schema import Experiment, ModelConfig


def load_weights(gpt: GPTModel, model: ModelConfig, weights: Weights) -> None:
    """Load matching weights into a model built for `model`; Megatron's vocabulary padding becomes zero."""
    parameters = dict(gpt.named_parameters())
    with torch.no_grad():
        for parameter in mapping(model):
            target, row = parameters.pop(parameter.name), 0
            assert tuple(target.shape) == parameter.shape
            for part in parameter.parts:
                rows = read_rows(weights.tensors[part.tensor], part.first, part.count)
                target[row : row + part.count].copy_(rows)
                row += part.count
            target[row:] = 0
    assert not parameters


def published_tensors(gpt: GPTModel, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every published tensor of a model with its name, on the CPU and in the model's dtype; one at a time."""
    named = {name: p.detach() for name, p in gpt.named_parameters()}
    sources: dict[str, list[tuple[Parameter, int, int, int]]] = {}
    parameters = mapping(model)
    for parameter in parameters:
        row = 0
        for part in parameter.parts:
            parts = sources.setdefault(part.tensor, [])
            parts.append((parameter, row, part.first, part.count))
            row += part.count
    for name, shape in published(parameters).items():
        tensor = torch.empty(shape, dtype=named[parameters[0].name].dtype)
        for parameter, row, first, count in sources[name]:
            rows = named[parameter.name][row : row + count]
            tensor[first : first + count] = rows.to(tensor.dtype).cpu()
        yield name, tensor


def padding_rows(gpt: GPTModel, model: ModelConfig) -> dict[str, Tensor]:
    """The padding rows of the vocabulary, by Megatron's names: they are trained, but not part of a published model."""
    named = dict(gpt.named_parameters())
    return {
        each.name: named[each.name].detach()[-each.padding :].clone()
        for each in mapping(model)
        if each.padding
    }


def load_padding(gpt: GPTModel, model: ModelConfig, padding: Weights) -> None:
    """Restore the vocabulary's padding rows, by Megatron's names; call after `load_weights`."""
    named = dict(gpt.named_parameters())
    with torch.no_grad():
        for each in mapping(model):
            if each.padding:
                rows = read_rows(padding.tensors[each.name], 0, each.padding)
                named[each.name][-each.padding :].copy_(rows)


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
        require_intact(user_path(model.init_from), (STATE, PADDING))
        load_weights(gpt, model, fitting_weights(model))
    return start
