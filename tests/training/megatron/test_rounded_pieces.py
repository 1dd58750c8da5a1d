from __future__ import annotations

import math

import pytest
import torch

from quantexp.formats.spec import resolve
from quantexp.model.pieces import Piece
from quantexp.model.shards import WHOLE
from quantexp.training.megatron.rounded_pieces import RoundedPiece


@pytest.mark.parametrize(
    "name",
    ["mxfp8", "fp8_e4m3", "fp8_e5m2", "hifp8", "nvfp4", "fp8_1x128", "bfloat16", "fp16_scaled"],
)
def test_what_is_not_finite_stays_so_where_the_format_saturates(name: str) -> None:
    """An fp16 gradient that overflows must lower the loss scale, and no step may take it for a large number."""
    x = torch.linspace(-3, 3, 128).view(2, 64)
    x[0, 5], x[1, 7], x[1, 60] = math.inf, -math.inf, math.nan
    piece = RoundedPiece("w", Piece((2, 64), WHOLE, 0, 128), x.view(-1), resolve(name))
    piece.round(x, 0, 0, None, {})
    assert not any(value.isfinite() for value in (x[0, 5], x[1, 7], x[1, 60]))
    assert not torch.equal(x[0, :5], torch.linspace(-3, 3, 128)[:5]), "nothing was rounded"
