"""A part of a tensor that stands for it: rows, blocks of 32 rows, or heads, the same ones for the same extent.

Which ones follows from the extent and their number alone, so the tokens kept of a layer's input are those kept of its
output and gradients, in every iteration and run.

    rows    along the first axis: tokens; output width of a weight; sequences of the attention probabilities
    blocks  32 neighbouring rows that begin at a multiple of 32, so that blocks along tokens stay whole
    heads   of query, key, value, attention probabilities, and gradients of these and of the scores; others stay whole
"""

from __future__ import annotations

import random
from typing import Any

from quantexp.schema import SampleOf

BLOCK = 32
#: Where the heads lie in tensors that have them.
_HEAD_AXIS = {"attn_weights": 1, "grad_attn_weights": 1, "grad_scores": 1}
_WITH_HEADS = frozenset({"query", "key", "value", "grad_query", "grad_key", "grad_value"})


def sample_of(
    shape: tuple[int, ...], tensor_name: str, of: SampleOf, count: int
) -> dict[str, Any] | None:
    """What is kept, as the metadata has it: axis and ascending indices; None where all is kept."""
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
    """The shape of what is kept."""
    if sample is None:
        return shape
    axis = sample["axis"]
    return (*shape[:axis], len(sample["indices"]), *shape[axis + 1 :])
