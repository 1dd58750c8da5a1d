"""Random initial weights that are the same in every layout.

Every parameter is drawn whole, in fp32, by a CPU generator of its own, whose seed follows from the run's seed and the
parameter's global name; each rank keeps its part, rounded to the working dtype. The distributions are Megatron's:

    norms                            1
    proj and fc2 (experts too)       normal(0, init_std / sqrt(2 layers))
    all others                       normal(0, init_std), the padding of the vocabulary included

Besides the model, memory holds one whole parameter at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.shards import axis_of
from quantexp.quant.step_state import seed_of
from quantexp.schema import ModelConfig
from quantexp.training.megatron.parameters import Part


@torch.no_grad()
def draw_weights(parts: Mapping[str, Part], model: ModelConfig, seed: int) -> None:
    """Fill a rank's parts of a model with its initial weights."""
    for part in parts.values():
        if part.parameter.width is None:
            part.tensor.fill_(1.0)
            continue
        row = 0
        whole = _drawn(part.parameter, model, seed)
        shard = part.shard
        for start, stop in shard.ranges or ((0, whole.shape[0]),):
            piece = whole.narrow(shard.axis or 0, start, stop - start)
            part.tensor.narrow(shard.axis or 0, row, stop - start).copy_(piece)
            row += stop - start


def _drawn(parameter: Parameter, model: ModelConfig, seed: int) -> Tensor:
    std = model.init_std
    if axis_of(parameter.name) == 1:
        std /= math.sqrt(2.0 * model.num_layers)
    generator = torch.Generator().manual_seed(seed_of(seed, parameter.name))
    return torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
