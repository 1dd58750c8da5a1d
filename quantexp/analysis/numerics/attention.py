"""Attention probabilities of a captured layer, by head, as captured or recomputed from query and key.

    P = softmax(c q k^T + causal mask)      c = softmax_scale of the manifest, 1 / sqrt(head_dim) where it says none

query [queries, sequences, heads, D] and key [keys, sequences, groups, D] are captured after rotary embedding and before
groups are expanded; head h attends to group floor(h groups / heads). Recomputed probabilities are of values before
quantisation, in float32, without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, adaptive_max_pool2d

from quantexp.analysis.numerics.place import Place
from quantexp.capture.reader import CapturedTensor
from quantexp.errors import CaptureError

#: Queries and keys that a map has at most: larger ones are pooled.
MOST_PIXELS = 256
PROBABILITIES, GRADIENT = "attn_weights", "grad_attn_weights"


@dataclass(frozen=True)
class Maps:
    """One sequence's maps of one layer; [heads, queries, keys]."""

    place: Place
    probabilities: Tensor
    gradient: Tensor | None
    recomputed: bool
    #: Before pooling.
    num_queries: int
    num_keys: int
    #: Its heads' numbers, which a sample of heads leaves out some of.
    heads: Sequence[int]


@dataclass(frozen=True)
class Layer:
    """What was captured of one attention module in one micro-batch."""

    place: Place
    tensors: Mapping[str, CapturedTensor]

    @property
    def can_be_drawn(self) -> bool:
        """Whether the probabilities are there, or query and key."""
        return PROBABILITIES in self.tensors or {"query", "key"} <= set(self.tensors)


def layers_of(entries: Iterable[CapturedTensor]) -> list[Layer]:
    """Every attention module, iteration, micro-batch and rank with what was captured of it, in order."""
    found: dict[tuple[Any, ...], dict[str, CapturedTensor]] = {}
    places: dict[tuple[Any, ...], Place] = {}
    for entry in entries:
        place = Place.of(entry.metadata)
        if place.layer_type == "attention":
            key = (place.iteration, place.layer, place.micro_batch or 0, place.rank)
            found.setdefault(key, {})[place.tensor] = entry
            places.setdefault(key, place)
    return [Layer(places[key], found[key]) for key in sorted(found)]


def maps_of(layer: Layer, sequence: int = 0) -> Maps:
    """The maps of one sequence.

    Raises:
        CaptureError: tensors that cannot be read, or that do not fit together.
    """
    captured = layer.tensors.get(PROBABILITIES)
    if captured is not None:
        whole = _of_sequence(captured, sequence)
    else:
        whole = recomputed(layer.tensors["query"], layer.tensors["key"], sequence)
    gradient = layer.tensors.get(GRADIENT)
    return Maps(
        layer.place,
        pooled(whole, MOST_PIXELS),
        None if gradient is None else pooled_by_size(_of_sequence(gradient, sequence), MOST_PIXELS),
        captured is None,
        whole.shape[-2],
        whole.shape[-1],
        _heads(captured if captured is not None else layer.tensors["query"], whole.shape[0]),
    )


def recomputed(query: CapturedTensor, key: CapturedTensor, sequence: int) -> Tensor:
    """P of one sequence, float32 [heads, queries, keys].

    Raises:
        CaptureError: sampled tensors, or shapes that do not fit.
    """
    for entry in (query, key):
        if entry.metadata.get("sample"):
            raise CaptureError(f"{entry.label}: a sample, of which no attention can be recomputed")
    q, k = query.torch(), key.torch()
    fits = q.ndim == k.ndim == 4 and q.shape[1] == k.shape[1] and q.shape[3] == k.shape[3]
    if not fits or not q.shape[2] or not k.shape[2] or q.shape[2] % k.shape[2]:
        raise CaptureError(
            f"{query.label}: query and key must be [tokens, sequences, heads, head_dim] of one width, the heads a "
            f"multiple of the key's, got {list(q.shape)} and {list(k.shape)}"
        )
    told = query.metadata.get("softmax_scale")
    scale = 1 / math.sqrt(q.shape[3]) if told is None else float(told)
    return probabilities(q[:, sequence].float(), k[:, sequence].float(), scale)


def probabilities(q_THD: Tensor, k_TGD: Tensor, scale: float) -> Tensor:
    """Causal softmax attention, [heads, queries, keys]; the last query sees all keys."""
    num_queries, num_heads = q_THD.shape[:2]
    num_keys, num_groups = k_TGD.shape[:2]
    q_HTD = q_THD.transpose(0, 1)
    k_HTD = k_TGD.transpose(0, 1).repeat_interleave(num_heads // num_groups, 0)
    scores = scale * (q_HTD @ k_HTD.transpose(1, 2))
    hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
    return scores.masked_fill_(hidden, -math.inf).softmax(-1)


def pooled(x_HQK: Tensor, most: int) -> Tensor:
    """The largest probability of each cell of at most `most` x `most`: what attends is not averaged away."""
    side = min(most, x_HQK.shape[-1])
    rows = min(most, x_HQK.shape[-2])
    if (rows, side) == tuple(x_HQK.shape[-2:]):
        return x_HQK
    return adaptive_max_pool2d(x_HQK, (rows, side))


def pooled_by_size(x_HQK: Tensor, most: int) -> Tensor:
    """The mean of each cell."""
    side, rows = min(most, x_HQK.shape[-1]), min(most, x_HQK.shape[-2])
    if (rows, side) == tuple(x_HQK.shape[-2:]):
        return x_HQK
    return adaptive_avg_pool2d(x_HQK, (rows, side))


def future(num_queries: int, num_keys: int, most: int = MOST_PIXELS) -> Tensor:
    """Which cells of a pooled map lie wholly behind the causal mask; bool [rows, columns].

    Cell i of n holds the tokens floor(i N / n) to ceil((i + 1) N / n) - 1, as pooling has it.
    """
    rows, columns = min(most, num_queries), min(most, num_keys)
    last_query = -(-(torch.arange(rows) + 1) * num_queries // rows) - 1
    first_key = torch.arange(columns) * num_keys // columns
    return first_key[None, :] > last_query[:, None] + num_keys - num_queries


def _of_sequence(entry: CapturedTensor, sequence: int) -> Tensor:
    x = entry.torch()
    if x.ndim != 4 or not x.shape[0]:
        raise CaptureError(
            f"{entry.label} must be [sequences, heads, queries, keys], got the shape {list(x.shape)}"
        )
    return x[min(sequence, x.shape[0] - 1)].float()


def _heads(entry: CapturedTensor, num_heads: int) -> Sequence[int]:
    sample = entry.metadata.get("sample")
    if sample and sample.get("of") == "heads":
        return tuple(sample["indices"])
    return tuple(range(num_heads))
