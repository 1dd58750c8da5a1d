"""Collectives of tensors with unlike first extents, which gloo refuses and NCCL does not.

The all-to-all dispatcher of experts exchanges such tensors between the ranks that share an expert. Every rank knows
every extent, so the tensors are padded with zeros to the longest, and cut again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def padded(x: Tensor, length: int) -> Tensor:
    """x with rows of zeros up to a number of rows."""
    result = x.new_zeros(length, *x.shape[1:])
    result[: len(x)] = x
    return result


def gathering_unlike(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.all_gather`, also for tensors with unlike first extents."""

    def gather(tensors: list[Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths = [len(each) for each in tensors]
        if len(set(lengths)) == 1:
            return all_gather(tensors, x, *args, **kwargs)
        buffers = [x.new_empty(max(lengths), *x.shape[1:]) for _ in tensors]
        all_gather(buffers, padded(x, max(lengths)), *args, **kwargs)
        for each, buffer in zip(tensors, buffers, strict=True):
            each.copy_(buffer[: len(each)])
        return None

    return gather


def scattering_unlike(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.reduce_scatter`, also for tensors with unlike first extents."""

    def scatter(output: Tensor, inputs: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        lengths = [len(each) for each in inputs]
        if len(set(lengths)) == 1:
            return reduce_scatter(output, inputs, *args, **kwargs)
        buffer = output.new_empty(max(lengths), *output.shape[1:])
        reduce_scatter(buffer, [padded(x, max(lengths)) for x in inputs], *args, **kwargs)
        output.copy_(buffer[: len(output)])
        return None

    return scatter
