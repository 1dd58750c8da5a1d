"""Published weights into a model of Megatron's, and out of it again.

In: the parameters are filled in place, row by row from mapped files, converted to the working dtype (to nearest).
Beside the model no more is held than the pages of one parameter. Out: each published tensor is gathered from its
parameters by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.huggingface.weights import Weights, mapped
from quantexp.schema import ModelConfig


def load_weights(gpt: GPTModel, model: ModelConfig, weights: Weights) -> None:
    """Fill a model that was built for `model` with weights that fit it; Megatron's padding becomes zero."""
    parameters = dict(gpt.named_parameters())
    with torch.no_grad(), mapped() as files:
        for parameter in mapping(model):
            target, row = parameters.pop(parameter.name), 0
            assert tuple(target.shape) == parameter.shape
            for part in parameter.parts:
                rows = files.rows(weights.tensors[part.tensor], part.first, part.count)
                target[row : row + part.count].copy_(rows)
                row += part.count
            target[row:] = 0
            files.release()
    assert not parameters


def published_tensors(gpt: GPTModel, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every published tensor of a model, by name, on the CPU and in the model's dtype; one at a time."""
    named = {name: p.detach() for name, p in gpt.named_parameters()}
    whereabouts: dict[str, list[tuple[Parameter, int, int, int]]] = {}
    parameters = mapping(model)
    for parameter in parameters:
        row = 0
        for part in parameter.parts:
            places = whereabouts.setdefault(part.tensor, [])
            places.append((parameter, row, part.first, part.count))
            row += part.count
    for name, shape in published(parameters).items():
        tensor = torch.empty(shape, dtype=named[parameters[0].name].dtype)
        for parameter, row, first, count in whereabouts[name]:
            source = named[parameter.name][row : row + count]
            tensor[first : first + count] = source.to(tensor.dtype).cpu()
        yield name, tensor


def padding_rows(gpt: GPTModel, model: ModelConfig) -> dict[str, Tensor]:
    """The rows of Megatron's padding of the vocabulary, which are trained too and are no part of a published model."""
    named = dict(gpt.named_parameters())
    return {
        each.name: named[each.name].detach()[-each.padding :].clone()
        for each in mapping(model)
        if each.padding
    }


def load_padding(gpt: GPTModel, model: ModelConfig, kept: Weights) -> None:
    """Put back the padding's rows, by Megatron's names, after weights were loaded."""
    named = dict(gpt.named_parameters())
    with torch.no_grad(), mapped() as files:
        for each in mapping(model):
            if each.padding:
                rows = files.rows(kept.tensors[each.name], 0, each.padding)
                named[each.name][-each.padding :].copy_(rows)
