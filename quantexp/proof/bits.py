"""Whether tensors are equal bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def num_unequal(x: Tensor, y: Tensor) -> int:
    """Elements whose bits differ; NaN equals NaN."""
    if is_same_memory(x, y):
        return 0
    a, b = as_integers(x), as_integers(y.to(x.dtype))
    if torch.equal(a, b):
        return 0
    differ = a != b
    return int((differ & ~(x.isnan() & y.isnan())).sum())


def are_equal(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether shapes and bits of all pairs are equal; where NaN may be among them, `num_unequal` decides."""
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for x, y in pairs:
        if x.shape != y.shape:
            return False
        by_dtype.setdefault(x.dtype, []).append((x, y if y.dtype is x.dtype else y.to(x.dtype)))
    for dtype, own in by_dtype.items():
        if len(own) > 2:  # each comparison waits for a device
            x, y = (torch.cat([t.flatten() for t in each]) for each in zip(*own, strict=True))
            by_dtype[dtype] = [(x, y)]
    each = itertools.chain.from_iterable(by_dtype.values())
    return all(torch.equal(as_integers(x), as_integers(y)) for x, y in each)


def is_same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two plain tensors are views of the same elements."""
    return (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) == (
        y.data_ptr(),
        y.shape,
        y.stride(),
        y.dtype,
        y.device,
    ) and x.is_neg() == y.is_neg()


def as_integers(x: Tensor) -> Tensor:
    """The bits of a tensor."""
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)
