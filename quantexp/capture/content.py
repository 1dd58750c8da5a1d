"""The hash that tells a captured tensor's values from others: BLAKE3 of their bytes, in the order of their indices.

A cryptographic hash, as SHA-256 is, at several times its speed: a capture's hashes are counted while training needs the
same cores. (BLAKE3, O'Connor et al. 2020, section 2; the package `blake3` is its authors'.) A hash without a name in
front of it is the SHA-256 of captures that were written before.
"""

from __future__ import annotations

import hashlib

from blake3 import blake3
from isal import isal_zlib
from torch import Tensor

from quantexp.capture.safetensors import content_of

_BLAKE3 = "blake3:"
#: Bytes that stay in the processor's last cache while they are looked at twice: each piece takes the interpreter from
#: training twice.
_PIECE = 1 << 22


def content_hash(values: Tensor) -> str:
    """`blake3:` and 64 hex digits, of a CPU tensor's bytes without its shape and dtype."""
    return _BLAKE3 + blake3(content_of(values)).hexdigest()


def hash_and_crc(values: Tensor) -> tuple[str, int]:
    """`content_hash`, and the CRC-32 that zip archives have, from one read.

    Intel's isa-l folds the CRC (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
    Instruction"): on captured tensors several times as fast as zlib's tables.
    """
    content, hashed, crc = content_of(values), blake3(), 0
    for start in range(0, len(content), _PIECE):
        piece = content[start : start + _PIECE]
        hashed.update(piece)
        crc = isal_zlib.crc32(piece, crc)
    return _BLAKE3 + hashed.hexdigest(), crc


def has_hash(values: Tensor, wanted: str) -> bool:
    """Whether a CPU tensor's bytes have a hash, as the manifest gives it."""
    if wanted.startswith(_BLAKE3):
        return content_hash(values) == wanted
    return hashlib.sha256(content_of(values)).hexdigest() == wanted
