"""The compiled Triton attention kernels against the torch tiles, on a GPU.

In addition to the other order of sums, the matrix units keep fewer bits of a sum than float32, on both sides: one
score in 2^9 may be rounded to its other neighbour. The bound is that of the proof of engagement.
"""

from __future__ import annotations

import pytest
import torch

from quantexp.quant.attention import tiled
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.kernels.agreement import BOUND
from quantexp.quant.attention.tiled import kernels_for
from quantexp.quant.product_context import watch_products
from quantexp.quant.step_state import StepState, use_step_state

from .tiled_cases import (
    FULL_HIFP8,
    FULL_MXFP8,
    SCHEMES,
    by_tiles,
    declared,
    documents,
    far,
    operands,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("T", [1, 137, 1000])
@pytest.mark.parametrize(
    "words",
    [SCHEMES["bf16"], FULL_MXFP8, FULL_HIFP8, SCHEMES["mxfp4, P again"]],
    ids=["bf16", "mxfp8", "hifp8", "mxfp4"],
)
def test_agrees_with_the_tiles_of_torch(
    words: tuple[str, ...], T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = declared(*words)
    qkv = [x.cuda() for x in operands(torch.bfloat16, T, E=24)]
    assert kernels_for(AttentionCall(precision, 1.0), qkv[0], qkv[2]) is not None
    with use_step_state(StepState(1)) as state:
        state.begin(1, 0)
        for mask in (None, documents(T).cuda()):
            with watch_products():
                ours = by_tiles(precision, qkv, mask)
            again = by_tiles(precision, qkv, mask)
            assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))
            with monkeypatch.context() as patch:
                patch.setattr(tiled, "kernels_for", lambda *_: None)
                theirs = by_tiles(precision, qkv, mask)
            assert far(ours[0], theirs[0]) <= BOUND
            assert far(ours[3], theirs[3]) <= BOUND
