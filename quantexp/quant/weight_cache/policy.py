"""Policy of the weight cache: which quantised copies of a weight are kept within a step. Needs no torch, for `plan`.

A weight enters two products, fprop and dgrad, of every micro-batch.

    several micro-batches      both copies, from first use until the step ends
    one, forward recomputed    the copy for fprop, which the recomputed forward pass multiplies too
    one                        the copy for dgrad, from forward to backward, if it costs little beside fprop's: it is
                               the same tensor, or comes from the same read; fprop's copy has no further use
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache

from quantexp.quant.slots import Operand


def shares_read(first: Operand, second: Operand) -> bool:
    """Whether one read of a tensor produces both products' copies: they differ at most in the axis of their blocks.

    Operands that need the step state have a copy per product, unless the second reuses the forward copy.
    """
    if not first.quantised:
        return False
    if second.reuse:
        return True
    depend = first.needs_step_state or second.needs_step_state
    return not depend and first.format == second.format and first.options == second.options


def is_one_tensor(first: Operand, second: Operand) -> bool:
    """Whether two products that share a read multiply one copy."""
    return second.reuse or not first.has_blocks


@lru_cache(maxsize=4096)
def copy_key(operand: Operand, stream: str) -> Hashable:
    """A key, equal exactly if two operands of one tensor have equal values; without blocks the axis is ignored."""
    axis = operand.axis if operand.has_blocks else ""
    return replace(operand, axis=axis, reuse=False, clip_gradient=None), stream


def num_kept(fprop: Operand, dgrad: Operand, several: bool, recomputed: bool) -> int:
    """The largest number of copies of a weight cached at once.

    Args:
        fprop: the weight in the forward product.
        dgrad: the weight in the backward product.
        several: whether a step has several micro-batches.
        recomputed: whether each forward pass runs twice.
    """
    if several:
        kept = [o for o in (fprop, dgrad) if o.quantised and o.once_per_step]
        return len({copy_key(operand, operand.stream) for operand in kept})
    return int(fprop.quantised and fprop.once_per_step if recomputed else shares_read(fprop, dgrad))
