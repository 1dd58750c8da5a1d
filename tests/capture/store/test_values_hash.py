"""Hashes of captured values: the published XXH3, and the SHA-256 of older captures."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from quantexp.capture.store.values import content_hash, has_hash
from quantexp.errors import CaptureError
from quantexp.model.safetensors import content_of

#: 128 bits of the first bytes of xxHash's test data, seed 0 (its sanity_test_vectors.h, high half first).
PUBLISHED = {
    0: "99aa06d3014798d86001c324468d497f",
    1: "a6cd5e9392000f6ac44bdff4074eecdb",
    241: "99a80ecf0ecfc647c5a639ecd2030e5e",
    512: "18d2d110dcc9bca1617e49599013cb6b",
}


def data_of(num_bytes: int) -> torch.Tensor:
    """xxHash's: the highest bytes of 2654435761 times the powers of 11400714785074694797."""
    state, values = 2654435761, list[int]()
    for _ in range(num_bytes):
        values.append(state >> 56)
        state = state * 11400714785074694797 % (1 << 64)
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.parametrize("num_bytes", PUBLISHED)
def test_the_hash_is_xxh3(num_bytes: int) -> None:
    assert content_hash(data_of(num_bytes)) == "xxh3_128:" + PUBLISHED[num_bytes]


def test_values_are_hashed_in_the_order_of_their_indices() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert content_hash(x.T) == content_hash(x.T.contiguous()) != content_hash(x)


def test_hashes_of_either_kind_are_checked() -> None:
    x = torch.randn(100).bfloat16()
    other = x.clone()
    other[50] += 1
    before = hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest()
    for wanted in (content_hash(x), before):
        assert has_hash(x, wanted)
        assert not has_hash(other, wanted)


def test_a_hash_of_another_kind_is_no_damage() -> None:
    with pytest.raises(
        CaptureError, match=r"of the kind blake3 cannot be checked here, only xxh3_128 and"
    ):
        has_hash(torch.zeros(3), "blake3:af1349b9")


def test_bytes_hold_their_tensor() -> None:
    content = content_of(torch.arange(1000))
    others = [torch.full((1000,), -1) for _ in range(100)]
    assert np.frombuffer(content, np.int64).tolist() == list(range(1000))
    del others


def test_values_elsewhere_are_refused() -> None:
    with pytest.raises(ValueError, match="values on meta, to be read from the host's memory"):
        content_of(torch.zeros(3, device="meta"))
