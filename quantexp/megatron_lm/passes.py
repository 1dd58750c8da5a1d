"""Tells the scheme and the observer which micro-batch Megatron-LM's schedule computes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from quantexp.training.megatron.passes import Begin, begin_backward


def told_micro_batches(
    forward_step: Callable[..., Any], begin: Begin, is_pipelined: bool
) -> Callable[..., Any]:
    """Megatron-LM's forward step, which calls `begin` before each forward pass of a rank's micro-batch.

    In a pipeline, whose backward passes follow forward passes of later micro-batches, also before each backward pass.
    """
    calls = Counter[int]()

    @functools.wraps(forward_step)
    def step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        index = calls[id(model)]
        calls[id(model)] += 1
        begin(index)
        output, *rest = forward_step(data_iterator, model, *args, **kwargs)
        if is_pipelined and output.requires_grad:
            begin_backward(output, lambda: begin(index))
        return (output, *rest)

    return step
