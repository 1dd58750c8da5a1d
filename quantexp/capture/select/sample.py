"""Samples a part of a tensor: rows, blocks of 32 rows, or heads.

The choice depends only on the extent and on the number, so a layer's input, output and gradients keep the same tokens,
in every iteration and run.

    rows    along the first axis: tokens; output width of a weight; sequences of the attention probabilities
    blocks  32 neighbouring rows from a multiple of 32, so that blocks along tokens stay complete
    heads   of query, key, value, attention probabilities, and gradients of these and of the scores; others are complete
"""

from __future__ import annotations

import random
from typing import Any

from quantexp.schema import SampleOf

BLOCK = 32
#: The axis of the heads in tensors that have heads.
_HEAD_AXIS = {"attn_weights": 1, "grad_attn_weights": 1, "grad_scores": 1}
_WITH_HEADS = frozenset({"query", "key", "value", "grad_query", "grad_key", "grad_value"})


def sample_of(
    shape: tuple[int, ...], tensor_name: str, of: SampleOf, count: int
) -> dict[str, Any] | None:
    """The sample as in the metadata: axis and ascending indices; None if the whole tensor is kept."""
    axis = 0
    if of is SampleOf.heads:
        if tensor_name not in _WITH_HEADS and tensor_name not in _HEAD_AXIS:
            return None
        axis = _HEAD_AXIS.get(tensor_name, 2)
    if not count or not shape:
        return None
    extent = shape[axis]
    units = -(-extent // BLOCK) if of is SampleOf.blocks else extent
    if count >= units:
        return None
    chosen = sorted(random.Random(f"{of.value} {extent}").sample(range(units), count))
    if of is SampleOf.blocks:
        chosen = [i for b in chosen for i in range(b * BLOCK, min(extent, (b + 1) * BLOCK))]
    return {"of": of.value, "axis": axis, "indices": chosen, "shape": list(shape)}


def sampled_shape(shape: tuple[int, ...], sample: dict[str, Any] | None) -> tuple[int, ...]:
    """The shape of the sample."""
    if sample is None:
        return shape
    axis = sample["axis"]
    return (*shape[:axis], len(sample["indices"]), *shape[axis + 1 :])
