"""Attention probabilities of a captured layer, by head, as captured or recomputed from query and key.

    P = softmax(c q k^T + mask)      c = softmax_scale of the manifest, 1 / sqrt(head_dim) where it says none

The mask is causal, and within documents where the manifest says where they begin (`document_starts`).

query [queries, sequences, heads, D] and key [keys, sequences, groups, D] are captured after rotary embedding and before
groups are expanded; head h attends to group floor(h groups / heads). Recomputed probabilities are of values before
quantisation, in float32, without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, adaptive_max_pool2d

from quantexp.analysis.tensors.place import Place
from quantexp.capture.reader import CapturedTensor
from quantexp.errors import CaptureError
from quantexp.quant.attention.documents import hidden

#: Maximum queries and keys of a map; larger maps are pooled.
MOST_PIXELS = 256
PROBABILITIES, GRADIENT = "attn_weights", "grad_attn_weights"
STARTS: Final = "document_starts"


@dataclass(frozen=True)
class Maps:
    """One sequence's maps of one layer; [heads, queries, keys]."""

    place: Place
    probabilities: Tensor
    gradient: Tensor | None
    recomputed: bool
    #: The extents before pooling.
    num_queries: int
    num_keys: int
    #: The indices of the heads, of which a sample has only some.
    heads: Sequence[int]
    #: The first tokens of documents that do not attend to each other; None means one document.
    starts: Sequence[int] | None = None


@dataclass(frozen=True)
class Layer:
    """The captured tensors of one attention module in one micro-batch."""

    place: Place
    tensors: Mapping[str, CapturedTensor]

    @property
    def can_be_drawn(self) -> bool:
        """Whether the probabilities, or query and key, were captured."""
        return PROBABILITIES in self.tensors or {"query", "key"} <= set(self.tensors)

    @property
    def lacks_mask(self) -> bool:
        """Whether P must be recomputed but the document boundaries are unknown."""
        return PROBABILITIES not in self.tensors and STARTS not in self.tensors["query"].metadata


def layers_of(entries: Iterable[CapturedTensor]) -> list[Layer]:
    """The captures of every attention module, iteration, micro-batch and rank, in order."""
    tensors_of: dict[tuple[Any, ...], dict[str, CapturedTensor]] = {}
    places: dict[tuple[Any, ...], Place] = {}
    for entry in entries:
        place = Place.of(entry.metadata)
        if place.layer_type == "attention":
            key = (place.iteration, place.layer, place.micro_batch or 0, place.rank)
            tensors_of.setdefault(key, {})[place.tensor] = entry
            places.setdefault(key, place)
    return [Layer(places[key], tensors_of[key]) for key in sorted(tensors_of)]


def maps_of(layer: Layer, sequence: int = 0) -> Maps:
    """The maps of one sequence, one head at a time in memory.

    Raises:
        CaptureError: tensors that cannot be read, or that do not fit together.
    """
    captured, gradient = layer.tensors.get(PROBABILITIES), layer.tensors.get(GRADIENT)
    if captured is None:
        heads = recomputed(layer.tensors["query"], layer.tensors["key"], sequence)
    else:
        heads = _heads_of(captured, sequence)
    probabilities = []
    num_queries = num_keys = 0
    for head in heads:
        num_queries, num_keys = head.shape
        probabilities.append(pooled(head[None], MOST_PIXELS))
    gradients = () if gradient is None else _heads_of(gradient, sequence)
    means = [pooled_by_size(head[None], MOST_PIXELS) for head in gradients]
    return Maps(
        layer.place,
        torch.cat(probabilities),
        torch.cat(means) if means else None,
        captured is None,
        num_queries,
        num_keys,
        _numbers(captured or layer.tensors["query"], len(probabilities)),
        _starts(captured or layer.tensors["query"], sequence),
    )


def recomputed(query: CapturedTensor, key: CapturedTensor, sequence: int) -> Iterator[Tensor]:
    """P of one sequence, head by head, float32 [queries, keys].

    Raises:
        CaptureError: sampled tensors, or shapes that do not fit.
    """
    for entry in (query, key):
        if entry.metadata.get("sample"):
            raise CaptureError(f"{entry.label}: a sample, of which no attention can be recomputed")
    q, k = query.torch(), key.torch()
    fits = q.ndim == k.ndim == 4 and q.shape[1] == k.shape[1] and q.shape[3] == k.shape[3]
    if not (fits and q.numel() and k.numel()) or q.shape[2] % k.shape[2]:
        raise CaptureError(
            f"{query.label}: query and key must be [tokens, sequences, heads, head_dim] of one width, the heads a "
            f"multiple of the key's, got {list(q.shape)} and {list(k.shape)}"
        )
    recorded = query.metadata.get("softmax_scale")
    scale = 1 / math.sqrt(q.shape[3]) if recorded is None else float(recorded)
    starts = _starts(query, sequence)
    for head in range(q.shape[2]):
        group = head * k.shape[2] // q.shape[2]
        yield probabilities(
            q[:, sequence, head].float(), k[:, sequence, group].float(), scale, starts
        )


def probabilities(
    q_QD: Tensor, k_KD: Tensor, scale: float, starts: Sequence[int] | None = None
) -> Tensor:
    """Causal softmax attention of one head, [queries, keys]; the last query attends to all keys of its document."""
    mask = hidden(q_QD.shape[0], k_KD.shape[0], starts)
    return (scale * (q_QD @ k_KD.T)).masked_fill_(mask, -math.inf).softmax(-1)


def _starts(entry: CapturedTensor, sequence: int) -> Sequence[int] | None:
    starts = entry.metadata.get(STARTS)
    return None if starts is None else starts[min(sequence, len(starts) - 1)]


def pooled(x_HQK: Tensor, most: int) -> Tensor:
    """Max-pool a map to at most `most` x `most` cells, which keeps strong attention visible."""
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


def masked(
    num_queries: int, num_keys: int, starts: Sequence[int] | None = None, most: int = MOST_PIXELS
) -> Tensor:
    """The completely masked cells of a pooled map; bool [rows, columns]."""
    seen = (~hidden(num_queries, num_keys, starts)).float()
    return pooled(seen[None], most)[0] == 0


def _heads_of(entry: CapturedTensor, sequence: int) -> Iterator[Tensor]:
    x = entry.torch()
    if x.ndim != 4 or not x.numel():
        raise CaptureError(
            f"{entry.label} must be [sequences, heads, queries, keys], got the shape {list(x.shape)}"
        )
    for head in x[min(sequence, x.shape[0] - 1)]:
        yield head.float()


def _numbers(entry: CapturedTensor, num_heads: int) -> Sequence[int]:
    """The captured heads."""
    sample = entry.metadata.get("sample")
    if sample and sample.get("of") == "heads":
        return tuple(sample["indices"])
    return tuple(range(num_heads))
