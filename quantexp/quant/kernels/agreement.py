"""Whether the kernels of attention in tiles gave what the tiles of torch give, from the same operands.

The two sum in another order (`gpu`), so that P and dS differ in a few elements by a unit of the working dtype or by a
step of their grid. Held against each other are o, dq, dk and dv of each head, by the norm of their difference:

    |ours - theirs|  <=  2^-7 |theirs| + noise

A score that is rounded to its other neighbour moves by 2^-8 of itself, and its p by as much of p: 2^-4 where the score
is 16. One in 2^12 of them is 2^-10 in the root mean square; in Triton's interpreter it was less than 2^-11 for every
format. An operand that was not quantised differs by 2^-5.2 in mxfp8 and hifp8, and by more in mxfp6 and mxfp4. Blocks
along the other axis are told from those declared in mxfp4 and mxfp6, not in mxfp8, whose values a power of two changes
only where they are 2^15 below the largest of their block: there they hardly differ.

dP - d, where all of a row's dP are nearly alike, is rounding alone: `noise` is what a part in 2^18 of |dO| |v| makes of
dq and dk. A scale of a whole P or dS may fall on the other side of a power of two, as the largest element may be one
that is rounded the other way: the amaxes then have to be within a factor of two, and the kernels are called once more
with the tiles' own, to be compared.
Where theirs holds NaN or Inf, as under an fp16 scale that overflows, nothing is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from quantexp.errors import EngagementError
from quantexp.quant.attention.tile_products import Slot, TileProducts
from quantexp.quant.kernels.gpu import DO_FOR_P, V_FOR_P, K, Kernels, Q
from quantexp.quant.precision import slot_label

#: Of the norm of a head's result.
BOUND = 2.0**-7
#: Of the largest that a head's dP could be.
NOISE = 2.0**-18
#: Of the larger of two amaxes.
AMAX_BOUND = 0.5

Result = TypeVar("Result")


def require_output(kernels: Kernels, work: TileProducts, ours: Tensor, theirs: Tensor) -> None:
    """Hold o, [N, T, E], against that of the tiles.

    Raises:
        EngagementError: they do not agree.
    """
    ours = _under_their_scales(kernels, work, ours, lambda a: kernels.forward(work.held, a))
    _require(work, "o", ours, theirs, 0.0)


def require_gradients(
    kernels: Kernels,
    work: TileProducts,
    ours: tuple[Tensor, Tensor, Tensor],
    theirs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Hold dq, dk and dv, [N, T, D or E], against those of the tiles.

    Raises:
        EngagementError: they do not agree.
    """
    ours = _under_their_scales(kernels, work, ours, lambda a: kernels.backward(work.held, a))
    dP_N = _norms(work.whole(DO_FOR_P)) * _largest(work.whole(V_FOR_P)) * NOISE
    noise = {"dq": dP_N * _largest(work.whole(K)), "dk": dP_N * _largest(work.whole(Q))}
    for name, one, other in zip(("dq", "dk", "dv"), ours, theirs, strict=True):
        _require(work, name, one, other, noise.get(name, 0.0))


def _under_their_scales(
    kernels: Kernels,
    work: TileProducts,
    ours: Result,
    again: Callable[[dict[Slot, Tensor]], Result],
) -> Result:
    """What to compare: `ours`, or, under other scales of a whole P or dS, what the kernels give under the tiles'."""
    differ = False
    for slot, amax in kernels.amaxes.items():
        one, other = float(amax), float(work.amaxes[slot])
        differ |= one != other
        if not abs(one - other) <= AMAX_BOUND * max(one, other):
            raise EngagementError(
                f"{slot_label(work.precision.module, *slot)}: its amax is {one:.4g} in Triton's kernel and {other:.4g} "
                "in the tiles of torch; use training.attention=plain"
            )
    return again(work.amaxes) if differ else ours


def _require(
    work: TileProducts, name: str, ours: Tensor, theirs: Tensor, noise_N: Tensor | float
) -> None:
    if not bool(theirs.isfinite().all()):
        return
    theirs_N = _norms(theirs)
    far_N = _norms(ours.float() - theirs.float())
    is_near = far_N <= BOUND * theirs_N + noise_N
    if bool(is_near.all()):
        return
    head = int((~is_near).nonzero()[0])
    raise EngagementError(
        f"{work.precision.module}: {name} of Triton's kernel is not that of the tiles of torch: head {head} differs by "
        f"{float(far_N[head]):.3g} where its norm is {float(theirs_N[head]):.3g}, allowed are {BOUND:.3g} of that; use "
        "training.attention=plain"
    )


def _norms(x_NTW: Tensor) -> Tensor:
    """Of each head, in float32."""
    norms: Tensor = torch.linalg.vector_norm(x_NTW.float(), dim=(1, 2))
    return norms


def _largest(x_NTW: Tensor) -> Tensor:
    """The largest norm of a token's, of each head."""
    norms: Tensor = torch.linalg.vector_norm(x_NTW.float(), dim=2)
    return norms.amax(dim=1)
