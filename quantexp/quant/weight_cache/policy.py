"""Which quantised copies of a weight are kept within a step; without torch, for the plan.

A weight enters two products, fprop and dgrad, of every micro-batch.

    several micro-batches      both copies, from when they are first needed until the step ends
    one, forward recomputed    the copy for fprop, which the recomputed forward multiplies too
    one                        the copy for dgrad, from forward to backward, where it comes with fprop's for nothing or
                               for little: the same tensor, or made by the same read; fprop's has no further use
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache

from quantexp.quant.slots import Operand


def shares_read(first: Operand, second: Operand) -> bool:
    """Whether two products' copies of one tensor come from one read: they differ at most in the axis of their blocks.

    What depends on the moment is another copy for each product, unless it is the forward's that is used again.
    """
    if not first.quantised:
        return False
    if second.reuse:
        return True
    depend = first.depends_on_moment or second.depends_on_moment
    return not depend and first.format == second.format and first.options == second.options


def is_one_tensor(first: Operand, second: Operand) -> bool:
    """Whether two products that share a read multiply the same copy."""
    return second.reuse or not first.has_blocks


@lru_cache(maxsize=4096)
def form(operand: Operand, stream: str) -> Hashable:
    """What two operands made from one tensor share exactly where their values do; without blocks the axis is none."""
    axis = operand.axis if operand.has_blocks else ""
    return replace(operand, axis=axis, reuse=False, clip_gradient=None), stream


def num_kept(fprop: Operand, dgrad: Operand, several: bool, recomputed: bool) -> int:
    """How many copies of a weight are kept at once, at most.

    Args:
        fprop: the weight in the forward product.
        dgrad: in the backward's.
        several: whether a step has several micro-batches.
        recomputed: whether each forward pass runs twice.
    """
    if several:
        kept = [o for o in (fprop, dgrad) if o.quantised and o.once_a_step]
        return len({form(operand, operand.stream) for operand in kept})
    return int(fprop.quantised and fprop.once_a_step if recomputed else shares_read(fprop, dgrad))
