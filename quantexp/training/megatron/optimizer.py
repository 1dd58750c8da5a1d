"""The optimizer step on a CPU, bit-identical but without temporaries the size of a weight.

Each operation of torch's Adam reads a whole tensor from memory, and two of them allocate a temporary of its size, whose
pages the system maps and unmaps in every step. Adam is elementwise, so `adam_in_strips` calls torch's function on parts
that stay in the caches. Megatron-Core's multiplication of tensors by a scalar allocates a third temporary; `scale_each`
allocates none unless the dtypes differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import adam as torch_adam

from quantexp.formats.torch_internals import without_torch_function

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
    """`torch.optim.adam.adam` in strips; with amsgrad or tensors that are not contiguous, torch's function itself."""
    rows = list(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True))
    if options["amsgrad"] or not all(x.is_contiguous() for row in rows for x in row):
        _adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, **options)
        return
    with without_torch_function():
        for row, step in zip(rows, state_steps, strict=True):
            parts = [torch.split(x.detach().view(-1), STRIP) for x in row]
            before = step.clone()
            for strips in zip(*parts, strict=True):
                step.copy_(before)  # each call increments the step
                _adam(*([strip] for strip in strips), [], [step], **options)


def scale_each(
    chunk_size: int, overflow: Tensor, tensor_lists: list[list[Tensor]], scale: float
) -> None:
    """Megatron's `local_multi_tensor_scale`: sets each tensor of the second list to one of the first times `scale`."""
    for source, target in zip(*tensor_lists, strict=True):
        if scale == 1.0:
            target.copy_(source)
        elif source.dtype == target.dtype:
            torch.mul(source, scale, out=target)
        else:
            target.copy_(source * scale)
