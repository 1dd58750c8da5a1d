"""Random initial weights that are the same in every layout.

Every parameter is drawn whole, in fp32, by a CPU generator of its own, whose seed follows from the run's seed and the
parameter's global name; each rank keeps its part, rounded to the working dtype. The distributions are Megatron's:

    norms                            1
    biases                           0
    proj and fc2 (experts too)       normal(0, init_std / sqrt(2 layers))
    all others                       normal(0, init_std), the padding of the vocabulary included

Besides the model, memory holds one whole parameter at a time. On a CPU torch's generator takes 32 bits of a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.shards import Shard, axis_of
from quantexp.quant.step_state import seed_of
from quantexp.schema import ModelConfig, TrainingConfig
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.transformer_config import DTYPES

#: The share of elements that `perturb_weights` moves.
PERTURBED_SHARE = 0.01
_BITS = {2: torch.int16, 4: torch.int32}


@torch.no_grad()
def draw_weights(parts: Mapping[str, Part], model: ModelConfig, seed: int) -> None:
    """Fill a rank's parts of a model with its initial weights."""
    for part in parts.values():
        if part.parameter.width is None:
            part.tensor.fill_(0.0 if part.parameter.name.endswith(".bias") else 1.0)
        else:
            _copy_part(_drawn(part.parameter, model, seed), part.shard, part.tensor)


@torch.no_grad()
def perturb_weights(parts: Mapping[str, Part], training: TrainingConfig) -> None:
    """Move a share of the elements by one unit in the last place of the working dtype, half of them away from zero.

    Which ones follows from `training.seed`, `training.chaos` and the parameter's global name, and so is the same in
    every layout. Zeros stay, and all elements do if `training.chaos` is 0.
    """
    if not training.chaos:
        return
    seed = seed_of(training.seed, f"chaos {training.chaos}")
    dtype = DTYPES[training.precision]
    for name, part in parts.items():
        generator = torch.Generator().manual_seed(seed_of(seed, name))
        drawn = torch.rand(part.parameter.shape, generator=generator)
        whole = (drawn < PERTURBED_SHARE / 2).char() - (drawn >= 1 - PERTURBED_SHARE / 2).char()
        steps = torch.empty(part.tensor.shape, dtype=torch.int8)
        _copy_part(whole, part.shard, steps)
        own = part.tensor.to(dtype)  # norms are in float32 until Megatron rounds them
        bits = own.view(_BITS[dtype.itemsize])
        moved = (bits + steps.to(bits)).view(dtype)
        part.tensor.copy_(torch.where(own == 0, own, moved))


def _copy_part(whole: Tensor, shard: Shard, to: Tensor) -> None:
    """Copy a rank's part of a whole parameter."""
    row, axis = 0, shard.axis or 0
    for start, stop in shard.ranges or ((0, whole.shape[0]),):
        piece = whole.narrow(axis, start, stop - start)
        to.narrow(axis, row, stop - start).copy_(piece)
        row += stop - start


def _drawn(parameter: Parameter, model: ModelConfig, seed: int) -> Tensor:
    std = model.init_std
    if axis_of(parameter.name) == 1:
        std /= math.sqrt(2.0 * model.num_layers)
    generator = torch.Generator().manual_seed(seed_of(seed, parameter.name))
    return torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
