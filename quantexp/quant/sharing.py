"""Operands that two products share: one read of a tensor, or one quantised copy. Needs no torch."""

from __future__ import annotations

from quantexp.formats.spec import QuantSpec


def shares_read(first: QuantSpec, second: QuantSpec) -> bool:
    """Whether one read of a tensor produces both products' copies: they differ at most in the axis of their blocks.

    Operands in parts, and those that need the step state, have a copy per product, unless the second reuses the forward
    copy.
    """
    if not first.quantised or first.parts or second.parts:
        return False
    if second.reuse:
        return True
    depend = first.needs_step_state or second.needs_step_state
    return not depend and first.along_any_axis == second.along_any_axis


def shares_copy(first: QuantSpec, second: QuantSpec) -> bool:
    """Whether two products of one tensor multiply one quantised copy."""
    return shares_read(first, second) and is_one_tensor(first, second)


def is_one_tensor(first: QuantSpec, second: QuantSpec) -> bool:
    """Whether two products that share a read multiply one copy."""
    return second.reuse or not first.has_blocks
