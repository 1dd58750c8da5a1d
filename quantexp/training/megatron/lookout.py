"""Finds the first tensor that is NaN or Inf in the passes of a step, repeated for that with every module watched.

Forward, it is the output of a module; backward, the gradient of an output or of a weight. An inner module comes before
the one that contains it. Of several ranks, the one with the earlier micro-batch counts, forward before backward, then
the earlier part of the model (the later one backward).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from quantexp.model.finite import count_words, is_finite, tensors_in
from quantexp.model.shards import global_name
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.experts import first_expert
from quantexp.training.megatron.model import first_layer, scheme_modules


class _Moment(NamedTuple):
    """When a tensor was seen; the earlier one is less."""

    micro_batch: int
    is_backward: bool
    #: The place of the chunk in the model, from its end in the backward pass.
    place: int


@dataclass
class Lookout:
    """What one rank has seen: the first tensor in time that was not finite."""

    forward_only: bool
    micro_batch: int = 0
    first: tuple[_Moment, str] | None = None

    def see(self, what: str, place: int, is_backward: bool, x: Tensor) -> None:
        """Look at a tensor of the chunk with this place in the model, unless an earlier one was not finite."""
        if self.first is not None or is_finite(x):
            return
        moment = _Moment(self.micro_batch, is_backward, -place if is_backward else place)
        direction = "backward" if is_backward else "forward"
        self.first = (
            moment,
            f"{what} ({direction}, micro-batch {self.micro_batch}): {count_words(x)}",
        )


@contextlib.contextmanager
def looking_out(chunks: Sequence[GPTModel], *, forward_only: bool) -> Iterator[Lookout]:
    """Watch every module of a rank's chunks inside; its micro-batch must be kept up to date.

    `forward_only` leaves gradients out: those of a loss that is not finite itself.
    """
    lookout, handles = Lookout(forward_only), []
    stage = parallel_state.get_pipeline_model_parallel_rank()
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    try:
        for index, chunk in enumerate(chunks):
            place = index * num_stages + stage
            for module, name in _names(chunk).items():
                watch = partial(_watch, lookout, name, place)
                handles.append(module.register_forward_hook(watch))
            for name, parameter in chunk.named_parameters() if not forward_only else ():
                shown = global_name(name, first_layer(chunk), first_expert(chunk))
                see = partial(lookout.see, f"the gradient of {shown}", place, True)
                handles.append(parameter.register_hook(_unchanged(see)))
        yield lookout
    finally:
        for handle in handles:
            handle.remove()


def first_of_all(lookout: Lookout) -> str | None:
    """The first tensor of all ranks that was not finite, in words; None if there was none. Every rank calls this."""
    firsts = [
        (first[0], rank, first[1])
        for rank, first in enumerate(gather(lookout.first))
        if first is not None
    ]
    if not firsts:
        return None
    _, rank, words = min(firsts)
    return f"the first tensor that is not finite is {words}, on rank {rank}"


def _names(gpt: GPTModel) -> dict[nn.Module, str]:
    """Every module as messages name it: `layer 1 fc2` if the precision map has it, else Megatron's global name."""
    scheme = {module: str(name) for name, module in scheme_modules(gpt).items()}
    layer, expert = first_layer(gpt), first_expert(gpt)
    return {
        module: scheme.get(module) or global_name(f"{path}.", layer, expert).rstrip(".")
        for path, module in gpt.named_modules()
        if path
    }


def _watch(
    lookout: Lookout, name: str, place: int, module: nn.Module, inputs: Any, output: Any
) -> None:
    for _, x in tensors_in(output):
        lookout.see(f"the output of {name}", place, False, x)
        if x.requires_grad and torch.is_grad_enabled() and not lookout.forward_only:
            see = partial(lookout.see, f"the gradient of the output of {name}", place, True)
            x.register_hook(_unchanged(see))  # type: ignore[no-untyped-call]


def _unchanged(see: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook of a gradient that only looks."""

    def hook(gradient: Tensor) -> None:
        see(gradient)

    return hook
