"""The tokens at the largest values of a captured tensor.

Tensors of tokens are [tokens, sequences, ...]; the largest magnitude of each token counts, so that the tokens differ.
Rows of routed experts, attention matrices and weights belong to no single token, and captures of earlier versions have
no list of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.analysis.tensors.place import Place
from quantexp.capture.lines import Sample, samples_of

#: Tokens of each tensor.
COUNT = 3
#: Tensors of four dimensions whose first two are no tokens and sequences.
_MATRICES = ("attn_weights", "exp_scores", "grad_attn_weights", "grad_scores")
_SAMPLES = lru_cache(maxsize=4)(samples_of)


def largest_tokens(
    folder: Path, metadata: Mapping[str, Any], x: Tensor
) -> tuple[dict[str, Any], ...]:
    """Up to `COUNT` tokens by largest finite magnitude: value, token, text, sample, position; empty if unknown."""
    place = Place.of(metadata)
    if x.ndim < 3 or place.source in _MATRICES or place.micro_batch is None or place.is_scale:
        return ()
    samples = _SAMPLES(folder).get((place.iteration, place.micro_batch, place.rank))
    positions = _positions(metadata, x)
    if samples is None or x.shape[1] != len(samples) or positions is None:
        return ()
    if positions and positions[-1] >= min(len(sample.ids) for sample in samples):
        return ()
    by_token = x.reshape(*x.shape[:2], -1)
    magnitude = by_token.float().abs().nan_to_num_(0, 0, 0)
    amax, at = magnitude.max(dim=2)
    values = by_token.gather(2, at.unsqueeze(2)).squeeze(2)
    flat = amax.reshape(-1)
    _, order = torch.topk(flat, min(COUNT, flat.numel()))
    places = [divmod(index, x.shape[1]) for index in order.tolist()]
    return tuple(
        _token(samples[b], positions[t], float(values[t, b]))
        for t, b in places
        if float(amax[t, b]) > 0
    )


def largest_words(tokens: tuple[dict[str, Any], ...] | list[dict[str, Any]]) -> str:
    """`-4.75 at ' the' (sample 12, token 37); ...`, to read."""
    return "; ".join(
        f"{one['value']:.4g} at {one['text']!r} (sample {one['sample']}, token {one['position']})"
        for one in tokens
    )


def _token(sample: Sample, position: int, value: float) -> dict[str, Any]:
    return {
        "value": value,
        "token": sample.ids[position],
        "text": sample.text(position),
        "sample": sample.index,
        "position": position,
    }


def _positions(metadata: Mapping[str, Any], x: Tensor) -> list[int] | None:
    """The position of each row of x among the tokens; None if the sample was taken along the sequences."""
    sample = metadata.get("sample")
    if not sample or sample["axis"] % len(sample["shape"]) not in (0, 1):
        return list(range(x.shape[0]))
    return list(sample["indices"]) if sample["axis"] % len(sample["shape"]) == 0 else None
