"""Where a rank's parts lie: the parts of all ranks make up the whole, and are those that training's table has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.proof.places import Piece, Ranks
from quantexp.quant.sites import Operand
from quantexp.training.megatron.numerics_state import Positions
from tests.training.megatron.test_numerics_state import WORDS, B, D, G, H, T

#: Operands by slot, and the shapes of the whole ones.
_WHOLE = {
    "qkv linear.fprop.x": (T, B, 32),
    "qkv linear.fprop.w": ((H + 2 * G) * D, 32),
    "qkv linear.dgrad.g": (T, B, (H + 2 * G) * D),
    "proj linear.fprop.x": (T, B, H * D),
    "proj linear.fprop.w": (32, H * D),
    "proj linear.dgrad.g": (T, B, 32),
    "fc1 linear.fprop.w": (24, 32),
    "fc1 linear.dgrad.g": (T, B, 24),
    "fc2 linear.fprop.x": (T, B, 12),
    "attention qk.fprop.q": (T, B, H, D),
    "attention qk.fprop.k": (T, B, G, D),
    "attention qk.dgrad_k.dS": (B * H, T, T),
    "attention pv.dgrad_p.dO": (B * H, T, D),
}
_LAYOUTS = [(2, 1), (1, 2), (2, 2), (4, 1)]


@cache
def _table(tensor: int, context: int, rank: int) -> Positions:
    layout = [f"parallel.tensor={tensor}", f"parallel.context={context}"]
    layout += [f"launcher.num_processes={tensor * context}", "parallel.unaligned=accept"]
    return Positions(compose([*WORDS, *layout, "training.global_batch_size=4"], None, {}), rank)


def _own_shape(
    operand: Operand, name: str, whole: tuple[int, ...], tensor: int, context: int
) -> tuple[int, ...]:
    shape = list(whole)
    if operand in (Operand.P, Operand.DS, Operand.DO):
        shape[0], shape[1] = shape[0] // tensor, shape[1] // context
    elif operand in (Operand.Q, Operand.K, Operand.V):
        shape[2] //= tensor if operand is Operand.Q else min(tensor, G)
        shape[0] //= context if operand is Operand.Q else 1
    else:
        is_row = name in ("proj", "fc2")
        if operand is Operand.W:
            shape[int(is_row)] //= tensor
        else:
            shape[-1] //= tensor if (operand is Operand.X) == is_row else 1
            shape[0] //= context
    return tuple(shape)


def _numbers(pieces: Sequence[Piece], shape: tuple[int, ...], whole: tuple[int, ...]) -> Tensor:
    """The number of each of a rank's elements in the whole."""
    numbered = torch.arange(math.prod(whole)).view(whole)
    if not pieces:
        assert shape == whole
        return numbered
    own = torch.full(shape, -1)
    for slices, place in pieces:
        assert place.whole == whole
        box = [slice(a, a + s.stop - s.start) for a, s in zip(place.start, slices, strict=True)]
        own[slices] = numbered[tuple(box)]
    return own


@pytest.mark.parametrize("layout", _LAYOUTS, ids=str)
@pytest.mark.parametrize("stream", _WHOLE)
def test_places_are_those_of_training_and_make_up_the_whole(
    stream: str, layout: tuple[int, int]
) -> None:
    name, slot = stream.split()
    operand, (tensor, context) = Operand(slot.rpartition(".")[2]), layout
    whole = _WHOLE[stream]
    shape = _own_shape(operand, name, whole, tensor, context)
    covered = torch.zeros(math.prod(whole), dtype=torch.int64)
    for c, t in itertools.product(range(context), range(tensor)):
        ranks = Ranks((t, tensor), (c, context), (0, 1), H // tensor, G)
        own = _numbers(ranks.pieces(name, operand, shape), shape, whole)
        table = _table(tensor, context, c * tensor + t)(f"layer 0 {stream}", shape)
        assert torch.equal(own, _numbers(table, shape, whole))
        covered[own.flatten()] += 1
    times = tensor * context * math.prod(shape) // math.prod(whole)
    assert bool((covered == times).all())


def test_an_expert_is_divided_by_its_own_ranks_and_its_rows_are_whole() -> None:
    ranks = Ranks((1, 2), (1, 2), (1, 4), 2, 2)
    (((rows, columns), place),) = ranks.pieces("expert3-fc2", Operand.X, (7, 5))
    assert (rows, columns) == (slice(0, 7), slice(0, 5))
    assert (place.whole, place.start) == ((7, 20), (0, 5))
