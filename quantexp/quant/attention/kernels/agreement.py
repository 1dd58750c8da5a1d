"""Agreement of the Triton attention kernels with the torch tiles, on the same operands.

The two sum in different orders (`gpu`), so a few elements of P and dS differ by one unit in the last place of the
working dtype or by one step of their grid. The comparison covers o, dq, dk and dv of each head, by the norm of the
difference:

    |ours - theirs|  <=  2^-7 |theirs| + noise

A score rounded to its other neighbour moves by 2^-8 of itself, and its p by as much of p: 2^-4 where the score is 16.
One such score in 2^12 gives 2^-10 in the root mean square; in Triton's interpreter it was less than 2^-11 for every
format. An operand that was not quantised differs by 2^-5.2 in mxfp8 and hifp8, and by more in mxfp6 and mxfp4. Blocks
along the wrong axis are detected in mxfp4 and mxfp6, but not in mxfp8: its values change with a power-of-two scale only
where they are 2^15 below the largest of their block, so the wrong axis makes hardly any difference.

Where all dP of a row are nearly equal, dP - d is rounding error alone: `noise` is the effect of one part in 2^18 of
|dO| |v| on dq and dk. The scale of a whole P or dS may fall on the other side of a power of two if the largest element
is rounded the other way. The amaxes must then agree within a factor of two, and the kernels run once more under the
tiles' own scales for the comparison.
If the tiles' result contains NaN or Inf, as under an fp16 scale that overflows, nothing is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from quantexp.errors import EngagementError
from quantexp.quant.attention.kernels.gpu import Kernels
from quantexp.quant.attention.tile_products import TileProducts
from quantexp.quant.sites import DGRAD_P_DO, DGRAD_P_V, FPROP_K, FPROP_Q, Slot

#: Relative to the norm of a head's result.
BOUND = 2.0**-7
#: Relative to the largest possible dP of a head.
NOISE = 2.0**-18
#: Relative to the larger of two amaxes.
AMAX_BOUND = 0.5

Result = TypeVar("Result")


def require_output(kernels: Kernels, work: TileProducts, ours: Tensor, theirs: Tensor) -> None:
    """Compare o, [N, T, E], with that of the tiles.

    Raises:
        EngagementError: they differ by more than the bound.
    """
    ours = _under_same_scales(kernels, work, ours, lambda a: kernels.forward(work.quantised, a))
    _require(work, "o", ours, theirs, 0.0)


def require_gradients(
    kernels: Kernels,
    work: TileProducts,
    ours: tuple[Tensor, Tensor, Tensor],
    theirs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Compare dq, dk and dv, [N, T, D or E], with those of the tiles.

    Raises:
        EngagementError: they differ by more than the bound.
    """
    ours = _under_same_scales(kernels, work, ours, lambda a: kernels.backward(work.quantised, a))
    dP_N = _norms(work.whole(DGRAD_P_DO)) * _largest(work.whole(DGRAD_P_V)) * NOISE
    noise = {"dq": dP_N * _largest(work.whole(FPROP_K)), "dk": dP_N * _largest(work.whole(FPROP_Q))}
    for name, result, expected in zip(("dq", "dk", "dv"), ours, theirs, strict=True):
        _require(work, name, result, expected, noise.get(name, 0.0))


def _under_same_scales(
    kernels: Kernels,
    work: TileProducts,
    ours: Result,
    rerun: Callable[[dict[Slot, Tensor]], Result],
) -> Result:
    """The result to compare: `ours`, or the kernels' result under the tiles' scales if these differ."""
    differ = False
    for slot, amax in kernels.amaxes.items():
        ours_amax, theirs_amax = float(amax), float(work.amaxes[slot])
        differ |= ours_amax != theirs_amax
        if not abs(ours_amax - theirs_amax) <= AMAX_BOUND * max(ours_amax, theirs_amax):
            raise EngagementError(
                f"{work.precision.module} {slot}: its amax is {ours_amax:.4g} in Triton's kernel and "
                f"{theirs_amax:.4g} in the tiles of torch; use training.attention=plain"
            )
    return rerun(work.amaxes) if differ else ours


def _require(
    work: TileProducts, name: str, ours: Tensor, theirs: Tensor, noise_N: Tensor | float
) -> None:
    if not bool(theirs.isfinite().all()):
        return
    theirs_N = _norms(theirs)
    difference_N = _norms(ours.float() - theirs.float())
    is_near = difference_N <= BOUND * theirs_N + noise_N
    if bool(is_near.all()):
        return
    head = int((~is_near).nonzero()[0])
    raise EngagementError(
        f"{work.precision.module}: {name} of Triton's kernel is not that of the tiles of torch: head {head} differs by "
        f"{float(difference_N[head]):.3g} where its norm is {float(theirs_N[head]):.3g}, allowed are {BOUND:.3g} of "
        "that; use training.attention=plain"
    )


def _norms(x_NTW: Tensor) -> Tensor:
    """The norm of each head, in float32."""
    norms: Tensor = torch.linalg.vector_norm(x_NTW.float(), dim=(1, 2))
    return norms


def _largest(x_NTW: Tensor) -> Tensor:
    """The largest norm of a token, for each head."""
    norms: Tensor = torch.linalg.vector_norm(x_NTW.float(), dim=2)
    return norms.amax(dim=1)
