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

from quantexp.formats.spec import QuantSpec
from quantexp.quant.sharing import shares_read


@lru_cache(maxsize=4096)
def copy_key(spec: QuantSpec, stream: str) -> Hashable:
    """A key, equal exactly if the copies of one tensor have equal values; without blocks the axis is ignored."""
    axis = spec.axis if spec.has_blocks else None
    return replace(spec.along_any_axis, axis=axis), stream


def num_kept(fprop: QuantSpec, dgrad: QuantSpec, several: bool, recomputed: bool) -> int:
    """The largest number of copies of a weight cached at once; each part of a sum counts as one.

    Args:
        fprop: the weight in the forward product.
        dgrad: the weight in the backward product.
        several: whether a step has several micro-batches.
        recomputed: whether each forward pass runs twice.
    """
    if several:
        kept = [spec for spec in (fprop, dgrad) if spec.quantised and spec.once_per_step]
        return sum({copy_key(spec, spec.stream): spec.num_pieces for spec in kept}.values())
    if recomputed:
        return fprop.num_pieces if fprop.quantised and fprop.once_per_step else 0
    return int(shares_read(fprop, dgrad))
