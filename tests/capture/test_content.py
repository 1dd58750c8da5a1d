"""Hashes of captured values: the published BLAKE3, and SHA-256 of captures that were written before."""

from __future__ import annotations

import hashlib
import zlib

import pytest
import torch

from quantexp.capture.content import content_hash, has_hash, hash_and_crc

#: The first 32 bytes of the hash of input_len bytes 0, 1, ..., 250, 0, ... (BLAKE3's test_vectors.json).
PUBLISHED = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
}


def counting(num_bytes: int) -> torch.Tensor:
    return torch.arange(num_bytes, dtype=torch.int64).remainder(251).to(torch.uint8)


@pytest.mark.parametrize("num_bytes", PUBLISHED)
def test_the_hash_is_blake3(num_bytes: int) -> None:
    assert content_hash(counting(num_bytes)) == "blake3:" + PUBLISHED[num_bytes]


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 18, (1 << 18) + 1, 3 << 18])
def test_one_read_gives_the_hash_and_the_crc(num_bytes: int) -> None:
    x = counting(num_bytes)
    raw = x.numpy().tobytes()
    assert hash_and_crc(x) == (content_hash(x), zlib.crc32(raw))


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
