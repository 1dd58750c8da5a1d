"""The weights with which a run begins, against those that its seed and configuration draw.

The first rows of each range that a rank holds are drawn again, by none of the code that drew the model's. A generator
begins a tensor with the same numbers however large the tensor is, but for its last 16; rows far from the beginning are
left out, because all before them have to be drawn.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.shards import Shard
from quantexp.quant.step_state import seed_of
from quantexp.schema import ModelConfig, TrainingConfig

#: Elements of a range of a parameter that are compared, up to a whole row.
DRAWN = 4096
#: The last element of a parameter that is drawn again: some 40 ms.
FURTHEST = 1 << 22
#: The matrices whose products are added to the residual stream.
_INTO_STREAM = ("linear_proj.weight", "linear_fc2.weight")
_BITS = {2: torch.int16, 4: torch.int32}


def difference(
    parameter: Parameter, shard: Shard, tensor: Tensor, model: ModelConfig, training: TrainingConfig
) -> str:
    """What a rank's part of a parameter has instead, in words; empty if it is right.

    Args:
        parameter: the whole parameter.
        shard: the part of it that `tensor` is.
        tensor: in the working dtype, before the first step.
        model: for the spread, which depends on the number of layers.
        training: for the seed, and the elements that `chaos` moves.
    """
    width = parameter.width or 1
    count, furthest = math.ceil(DRAWN / width), max(FURTHEST // width, 1)
    own, first, compared = tensor.detach(), 0, []
    for start, stop in shard.ranges if shard.axis == 0 else ((0, parameter.shape[0]),):
        kept = min(count, stop - start, furthest - start)
        compared += [(first + i, start + i) for i in range(kept)]
        first += stop - start
    if not compared:
        return ""
    last = max(row for _, row in compared) + 1
    whole = _drawn(parameter, last, model, training.seed).to(tensor.dtype)
    if training.chaos:
        whole = _moved(whole, parameter, training)
    own, expected = own[[i for i, _ in compared]], whole[[row for _, row in compared]]
    if shard.axis == 1:
        expected = torch.cat([expected[:, a:b] for a, b in shard.ranges], 1)
    wrong = int((own.cpu() != expected).sum())
    return f"{wrong} of {own.numel()} initial weights are not those of the seed" if wrong else ""


def _drawn(parameter: Parameter, rows: int, model: ModelConfig, seed: int) -> Tensor:
    """The first rows, in float32."""
    if parameter.width is None:
        return torch.full((rows,), 0.0 if parameter.name.endswith(".bias") else 1.0)
    is_output = parameter.name.endswith(_INTO_STREAM)
    std = model.init_std / (math.sqrt(2 * model.num_layers) if is_output else 1.0)
    generator = torch.Generator().manual_seed(seed_of(seed, parameter.name))
    return _beginning(parameter, rows).normal_(0.0, std, generator=generator)[:rows]


def _beginning(parameter: Parameter, rows: int) -> Tensor:
    """Memory for the first rows and 16 elements more, in whole rows."""
    more = math.ceil(16 / (parameter.width or 1))
    return torch.empty(min(parameter.shape[0], rows + more), *parameter.shape[1:])


def _moved(whole: Tensor, parameter: Parameter, training: TrainingConfig) -> Tensor:
    """What `training.chaos` makes of the first rows: 1% are one unit in the last place larger or smaller; not zeros."""
    seed = seed_of(seed_of(training.seed, f"chaos {training.chaos}"), parameter.name)
    generator = torch.Generator().manual_seed(seed)
    share = _beginning(parameter, len(whole)).uniform_(generator=generator)[: len(whole)]
    bits = whole.view(_BITS[whole.element_size()])
    steps = (share < 0.005).to(bits.dtype) - (share >= 0.995).to(bits.dtype)
    return torch.where(whole == 0, whole, (bits + steps).view(whole.dtype))
