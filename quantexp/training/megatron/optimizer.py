"""The optimizer's step on a CPU without fresh memory of a weight's size, to the same bits.

torch's Adam works on one tensor at a time, operation by operation: each reads the whole tensor from memory, and two of
them make another tensor of its size, whose pages the system hands out and takes back every step. `adam_in_strips` gives
the same function of torch every tensor in parts that stay in the caches. Its operations are element by element.
Megatron-Core's own multiplication of tensors by a number makes a third such tensor; `scale_each` does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import adam as torch_adam

from quantexp.quant.torch_internals import without_torch_function

#: Elements of a strip: 1 MiB in float32.
STRIP = 1 << 18
_adam: Any = torch_adam.adam


def adam_in_strips(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    **options: Any,
) -> None:
    """What `torch.optim.adam.adam` does, which does it by itself where tensors are not contiguous and with amsgrad."""
    rows = list(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True))
    if options["amsgrad"] or not all(x.is_contiguous() for row in rows for x in row):
        _adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, **options)
        return
    with without_torch_function():
        for row, step in zip(rows, state_steps, strict=True):
            parts = [torch.split(x.detach().view(-1), STRIP) for x in row]
            before = step.clone()
            for strips in zip(*parts, strict=True):
                step.copy_(before)  # each call counts one step more
                _adam(*([strip] for strip in strips), [], [step], **options)


def scale_each(
    chunk_size: int, overflow: Tensor, tensor_lists: list[list[Tensor]], scale: float
) -> None:
    """What Megatron's `local_multi_tensor_scale` does: the second list is the first times a number."""
    for source, goal in zip(*tensor_lists, strict=True):
        if scale == 1.0:
            goal.copy_(source)
        elif source.dtype == goal.dtype:
            torch.mul(source, scale, out=goal)
        else:
            goal.copy_(source * scale)
