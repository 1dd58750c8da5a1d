"""The content hash of a captured tensor's values: XXH3 of their bytes in index order.

It detects damage and distinguishes tensors, with the collision probability of 128 random bits (XXH3, Collet, xxHash's
documentation, "XXH3 algorithm overview"). No hash beside the values would protect against forgery. XXH3 runs at the
speed of memory, which matters because training needs the same cores; a cryptographic hash (BLAKE3) takes four times the
work. A hash without a prefix is the SHA-256 of an older capture.
"""

from __future__ import annotations

import hashlib

import xxhash
from torch import Tensor

from quantexp.errors import CaptureError
from quantexp.model.safetensors import content_of

_XXH3 = "xxh3_128:"


def content_hash(values: Tensor) -> str:
    """`xxh3_128:` and 32 hex digits, over a CPU tensor's bytes without its shape and dtype."""
    return _XXH3 + xxhash.xxh3_128_hexdigest(content_of(values))


def has_hash(values: Tensor, expected: str) -> bool:
    """Whether a CPU tensor's bytes have the manifest's hash.

    Raises:
        CaptureError: the kind of hash is unknown.
    """
    if expected.startswith(_XXH3):
        return content_hash(values) == expected
    kind, colon, _ = expected.partition(":")
    if colon:
        raise CaptureError(
            f"a hash of the kind {kind} cannot be checked here, only xxh3_128 and SHA-256"
        )
    return hashlib.sha256(content_of(values)).hexdigest() == expected
