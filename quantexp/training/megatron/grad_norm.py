"""The norm of the gradient, which does not depend on the layout.

Megatron adds squares in float32: in another order for every layout, so that clipping differs by 1e-7 from layout to
layout. Here squares are added in float64, over all tensors and ranks, and the norm is rounded to float32 once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as megatron_optimizer
from torch import Tensor

#: Elements of a gradient that are converted to float64 at a time: on a CPU, and on a GPU, where a short strip would
#: take longer to launch than to add.
STRIP, GPU_STRIP = 1 << 20, 1 << 24


def grad_norm(
    grads_for_norm: list[Tensor] | Tensor,
    norm_type: float = 2.0,
    grad_stats_parallel_group: torch.distributed.ProcessGroup | None = None,
) -> float:
    """Megatron's `get_grad_norm_fp32` for the 2-norm: a float32 number; NaN or Inf if an element is."""
    assert norm_type == 2.0
    grads = [grads_for_norm] if isinstance(grads_for_norm, Tensor) else grads_for_norm
    device = torch.device("cpu") if not grads else grads[0].device
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        total += sum_of_squares(grad)
    torch.distributed.all_reduce(total, group=grad_stats_parallel_group)
    norm = math.sqrt(total) if total.isfinite() else float(total)
    return float(torch.tensor(norm, dtype=torch.float64).to(torch.float32))


def sum_of_squares(x: Tensor) -> Tensor:
    """The sum of a tensor's squares, 0-dim float64; memory for one strip."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    length = STRIP if x.device.type == "cpu" else GPU_STRIP
    for strip in torch.split(x.detach().reshape(-1), length):
        total += torch.linalg.vector_norm(strip.double()).square()
    return total


@contextlib.contextmanager
def same_norm_in_every_layout() -> Iterator[None]:
    """Megatron's optimizers use `grad_norm` inside."""
    modules = (clip_grads, megatron_optimizer)
    before = [module.get_grad_norm_fp32 for module in modules]
    for module in modules:
        module.get_grad_norm_fp32 = grad_norm
    try:
        yield
    finally:
        for module, original in zip(modules, before, strict=True):
            module.get_grad_norm_fp32 = original
