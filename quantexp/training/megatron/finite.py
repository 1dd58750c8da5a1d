"""No optimizer step with a loss or gradient that is NaN or Inf; the decision is the same on all ranks.

The norm that clips the gradient is NaN or Inf if one element is, so the decision costs no pass over the gradient. What
was first is searched only when a step is left out. Its order is that of the backward pass: the output layer first, the
embedding last, each layer from its last product to its first. A tied embedding is last, although its gradient begins
at the output layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from quantexp.model.finite import count_words, first_nonfinite
from quantexp.model.shards import global_name
from quantexp.quant.precision import configured
from quantexp.quant.sites import WGRAD_G
from quantexp.training.megatron.collectives import any_rank, gather
from quantexp.training.megatron.experts import first_expert
from quantexp.training.megatron.model import first_layer, linear_weights

#: The parameters of an attention in the order of the forward pass; Megatron registers them in another.
_ATTENTION = (
    *("linear_qkv", "linear_q_proj", "linear_q_down_proj", "q_layernorm", "k_layernorm"),
    *(
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "kv_layernorm",
        "linear_kv_up_proj",
        "linear_proj",
    ),
)


def agree_on_overflow(optimizer: Any) -> None:
    """Make the ranks agree on whether an fp16 gradient overflows, so that their loss scales stay equal."""
    for each in chained(optimizer):
        if getattr(each, "grad_scaler", None) is not None:
            overflows: Callable[[], bool] = each._unscale_main_grads_and_check_for_nan
            each._unscale_main_grads_and_check_for_nan = lambda check=overflows: any_rank(check())


def step_if_finite(
    optimizer: Any, loss: float, around: AbstractContextManager[None] | None = None
) -> tuple[bool, float]:
    """Megatron's `step` of an optimizer, left out on all ranks if the loss or the gradient's norm is not finite.

    Returns whether the optimizer stepped, and the norm; Inf if an fp16 gradient overflowed. `loss` is the same on all
    ranks. `around` is entered before the main weights change and left before the model gets them.
    """
    if _overflows(optimizer):
        return False, math.inf
    norm = float(optimizer.get_grad_norm())
    if any_rank(not (math.isfinite(loss) and math.isfinite(norm))):
        return False, norm
    for each in chained(optimizer):
        if (parameters := each.get_parameters()) and each.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(parameters, each.config.clip_grad, norm)
    return _step(optimizer, around), norm


def _step(optimizer: Any, around: AbstractContextManager[None] | None) -> bool:
    if around is None:
        return bool(optimizer.step_with_ready_grads())
    inner = [each.optimizer for each in chained(optimizer) if not each.is_stub_optimizer]
    with around:
        for each in inner:
            each.step()
    for each in inner:  # Megatron's step is then only what follows
        vars(each)["step"] = lambda: None
    try:
        return bool(optimizer.step_with_ready_grads())
    finally:
        for each in inner:
            del vars(each)["step"]


def _overflows(optimizer: Any) -> bool:
    """Prepare the gradients; whether an fp16 one overflows, which lowers the loss scale of all chained optimizers."""
    scalers = [s for s in (getattr(each, "grad_scaler", None) for each in chained(optimizer)) if s]
    before = [scaler.state_dict() for scaler in scalers]
    overflows = bool(optimizer.prepare_grads())
    for scaler, state in zip(scalers, before, strict=True) if overflows else ():
        scaler.load_state_dict(state)
        scaler.update(True)
    return overflows


def chained(optimizer: Any) -> list[Any]:
    """The optimizers of a ChainedOptimizer; any other optimizer alone."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def cause(chunks: list[GPTModel], losses: list[float]) -> str:
    """What was not finite in the step that all ranks just left out, for a message; every rank calls this.

    Args:
        chunks: this rank's parts of the model, their gradients as the optimizer received them.
        losses: this rank's loss of each micro-batch.
    """
    by_rank = gather((losses, [_first_gradient(chunk) for chunk in chunks]))
    for rank, (of_rank, _) in enumerate(by_rank):
        for micro_batch, loss in enumerate(of_rank):
            if not math.isfinite(loss):
                return f"the loss of micro-batch {micro_batch} on rank {rank} is {loss}"
    # The backward pass goes through the last chunk of every stage, the last stage first, then the chunk before it.
    by_chunk = zip(*(firsts for _, firsts in reversed(by_rank)), strict=True)
    in_order = itertools.chain.from_iterable(reversed(list(by_chunk)))
    first = next((words for words in in_order if words is not None), None)
    return first or "the norm of a finite gradient exceeds float32"


def _first_gradient(gpt: GPTModel) -> str | None:
    first = first_nonfinite(gradients(gpt))
    if first is None:
        return None
    name, gradient = first
    labels = {id(weight): module for module, weight in linear_weights(gpt).items()}
    module = labels.get(id(gpt.get_parameter(name)))
    site = "" if module is None else configured(module.name, WGRAD_G).site.value
    slot = "" if module is None else f" ({module} {site}.wgrad)"
    shown = global_name(name, first_layer(gpt), first_expert(gpt))
    return (
        f"the gradient of {shown}{slot} is the first in the order of the backward pass that is not finite: "
        f"{count_words(gradient)}"
    )


def gradients(gpt: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """The main gradients in the order of the backward pass."""
    named: dict[str, Any] = dict(gpt.named_parameters())
    for _, group in itertools.groupby(
        reversed(named), lambda n: n.partition(".self_attention.")[0]
    ):
        for name in sorted(group, key=_place, reverse=True):
            yield name, named[name].main_grad


def _place(name: str) -> int:
    """The place in its attention's forward pass; the same for all other parameters."""
    part = name.split(".")[-2]
    return _ATTENTION.index(part) if part in _ATTENTION else -1
