"""The hash that tells a captured tensor's values from others: XXH3 of their bytes, in the order of their indices.

It finds damage and tells tensors apart: of 128 bits, as a random number would (XXH3, Collet, xxHash's documentation,
"XXH3 algorithm overview"). Against forgery no hash would help that stands beside the values. It is read as fast as
memory gives: a capture's hashes are counted while training needs the same cores, and a cryptographic one (BLAKE3) was
four times the work. A hash without a name in front of it is the SHA-256 of captures that were written before.
"""

from __future__ import annotations

import hashlib

import xxhash
from isal import isal_zlib
from torch import Tensor

from quantexp.errors import CaptureError
from quantexp.model.safetensors import content_of

_XXH3 = "xxh3_128:"
#: Bytes that stay in the processor's last cache while they are looked at twice: each piece takes the interpreter from
#: training twice.
_PIECE = 1 << 22


def content_hash(values: Tensor) -> str:
    """`xxh3_128:` and 32 hex digits, of a CPU tensor's bytes without its shape and dtype."""
    return _XXH3 + xxhash.xxh3_128_hexdigest(content_of(values))


def hash_and_crc(values: Tensor) -> tuple[str, int]:
    """`content_hash`, and the CRC-32 that zip archives have, from one read.

    Intel's isa-l folds the CRC (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
    Instruction"): on captured tensors several times as fast as zlib's tables.
    """
    content, hashed, crc = content_of(values), xxhash.xxh3_128(), 0
    for start in range(0, len(content), _PIECE):
        piece = content[start : start + _PIECE]
        hashed.update(piece)
        crc = isal_zlib.crc32(piece, crc)
    return _XXH3 + hashed.hexdigest(), crc


def has_hash(values: Tensor, wanted: str) -> bool:
    """Whether a CPU tensor's bytes have a hash, as the manifest gives it.

    Raises:
        CaptureError: a hash of another kind.
    """
    if wanted.startswith(_XXH3):
        return content_hash(values) == wanted
    kind, colon, _ = wanted.partition(":")
    if colon:
        raise CaptureError(
            f"a hash of the kind {kind} cannot be checked here, only xxh3_128 and SHA-256"
        )
    return hashlib.sha256(content_of(values)).hexdigest() == wanted
