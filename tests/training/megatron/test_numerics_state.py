"""The positions of a rank's operands: the parts of a numbered operand, cut by hand as ranks have them, are found again.

The oracle is the whole operand, whose elements are their own positions in row-major order.

    # T tokens, B sequences, H query heads, G key-value heads, D width of a head
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.quant.sites import Operand
from quantexp.training.megatron.numerics_state import Positions

T, B, H, G, D, FFN = 16, 3, 4, 2, 6, 12
_FORMAT = "{format: mxfp4, rounding: stochastic}"
WORDS = [
    *("model=llama32-1b", "quant=linear_mxfp4", "quant/qk=mxfp4", "quant/pv=mxfp4"),
    "quant/output=mxfp4",
    *(f"model.num_attention_heads={H}", f"model.num_query_groups={G}", f"model.head_dim={D}"),
    *(f"model.ffn_hidden_size={FFN}", f"training.seq_length={T}", "training=fast"),
    *(f"quant.{site}.rounding=stochastic" for site in ("linear", "qk", "pv", "output")),
    *(f"quant.qk.dgrad_q.{each}={_FORMAT}" for each in ("dS", "k")),
    *(f"quant.qk.dgrad_k.{each}={_FORMAT}" for each in ("dS", "q")),
    *(f"quant.pv.dgrad_p.{each}={_FORMAT}" for each in ("dO", "v")),
]
#: tensor, context, and the rank: of context rank 1, tensor rank 1.
LAYOUTS = {"tp2": (2, 1, 1), "cp2": (1, 2, 1), "tp2 cp2": (2, 2, 3), "tp4": (4, 1, 3)}


@cache
def positions(name: str) -> Positions:
    tensor, context, rank = LAYOUTS[name]
    words = [f"parallel.tensor={tensor}", f"parallel.context={context}"]
    processes = f"launcher.num_processes={tensor * context}"
    layout = [*words, processes, "parallel.unaligned=accept", "training.global_batch_size=4"]
    return Positions(compose([*WORDS, *layout], None, {}), rank)


def numbered(*shape: int) -> Tensor:
    """Each element is its position."""
    return torch.arange(math.prod(shape)).view(shape)


def found(of: Positions, stream: str, part: Tensor) -> Tensor:
    """The positions of a part's elements."""
    result = torch.full_like(part, -1)
    module = "" if stream.startswith("output") else "layer 0 "
    for indices, place in of(f"{module}{stream}", tuple(part.shape)):
        shape = result[indices].shape
        whole = numbered(*place.whole)
        box = tuple(slice(a, a + n) for a, n in zip(place.start, shape, strict=True))
        assert bool((result[indices] == -1).all()), "pieces do not overlap"
        result[indices] = whole[box]
    return result


def own_heads(x: Tensor, dim: int, name: str) -> Tensor:
    """The last of the ranks' heads."""
    return x.chunk(LAYOUTS[name][0], dim)[-1]


def own_tokens(x: Tensor, dim: int, name: str) -> Tensor:
    """Of two ranks the second has the two quarters in the middle."""
    return x if LAYOUTS[name][1] == 1 else x.narrow(dim, T // 4, T // 2)


def of_scores(last: int, name: str) -> Tensor:
    """P, dS and dO: [B, H, T, last] with sequences and heads in one axis."""
    x = own_tokens(own_heads(numbered(B, H, T, last), 1, name), 2, name)
    return x.flatten(0, 1)


CASES: dict[str, Callable[[str], Tensor]] = {
    "attention qk.fprop.q": lambda n: own_tokens(own_heads(numbered(T, B, H, D), 2, n), 0, n),
    "attention qk.dgrad_k.q": lambda n: own_tokens(own_heads(numbered(T, B, H, D), 2, n), 0, n),
    "attention qk.dgrad_q.dS": lambda n: of_scores(T, n),
    "attention pv.fprop.P": lambda n: of_scores(T, n),
    "attention pv.dgrad_p.dO": lambda n: of_scores(D, n),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("stream", CASES)
def test_a_ranks_queries_lie_where_one_process_has_them(stream: str, name: str) -> None:
    part = CASES[stream](name)
    assert torch.equal(found(positions(name), stream, part), part)


@pytest.mark.parametrize("name", ["tp2", "tp2 cp2", "tp4"])
@pytest.mark.parametrize("stream", ["qk.fprop.k", "qk.dgrad_q.k", "pv.fprop.v"])
def test_a_ranks_keys_and_values_are_those_of_whole_sequences(stream: str, name: str) -> None:
    """Of four ranks two share a group, and the last one has the last of two."""
    part = numbered(T, B, G, D)[:, :, 1:]
    assert torch.equal(found(positions(name), f"attention {stream}", part), part)


def test_keys_of_all_heads_are_whole() -> None:
    assert positions("cp2")("layer 0 attention qk.fprop.k", (T, B, G, D)) == ()


def test_gate_and_up_lie_apart() -> None:
    weight = numbered(2 * FFN, 8)
    part = torch.cat([weight[FFN // 2 : FFN], weight[FFN + FFN // 2 :]])
    assert torch.equal(found(positions("tp2"), "fc1 linear.fprop.w", part), part)


@pytest.mark.parametrize("name", ["tp2", "tp2 cp2", "tp4"])
def test_ranks_divide_the_padded_vocabulary(name: str) -> None:
    """The last rank has the last rows of the weight and the last columns of the gradient, 384 in all."""
    of, tensor = positions(name), LAYOUTS[name][0]
    weight = numbered(384, 8).chunk(tensor)[-1]
    assert torch.equal(found(of, "output layer output.fprop.w", weight), weight)
    g = own_tokens(numbered(T, B, 384).chunk(tensor, -1)[-1], 0, name)
    assert torch.equal(found(of, "output layer output.wgrad.g", g), g)
    if name != "tp2 cp2":
        assert of("output layer output.fprop.x", (T, B, 8)) == ()


def test_every_operand_has_a_case() -> None:
    """Of attention: a new one would be divided in some way, too. What leaves a norm is never rounded at random."""
    names = {stream.rpartition(".")[2] for stream in CASES} | {"k", "v"}
    assert names == {each.value for each in Operand} - {"x", "w", "g", "y"}
