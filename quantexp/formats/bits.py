"""Float32 as bits: reads exponents and builds powers of two without log2 or exp2."""

from __future__ import annotations

import torch
from torch import Tensor

MANTISSA_BITS = 23
#: Bias of the exponent field, and of an E8M0 scale byte.
BIAS = 127
SIGN_MASK = -(1 << 31)
MAGNITUDE_MASK = 0x7FFFFFFF
EXPONENT_MASK = 0x7F800000
NAN_BITS = 0x7FC00000
#: 2^-127, the only E8M0 scale that is subnormal in float32.
_TWO_TO_MINUS_127_BITS = 1 << 22


def _word(bits: int) -> Tensor:
    """A tensor that operators accept unconverted on any device; they convert a Python number at each call."""
    return torch.tensor(bits, dtype=torch.int32, device="cpu")


EXPONENT_WORD = _word(EXPONENT_MASK)
_FIELDS_OF_INVERSES = _word((2 * BIAS) << MANTISSA_BITS)


def as_bits(x: Tensor) -> Tensor:
    """The bits of a float32 tensor, as int32 over the same memory."""
    return x.view(torch.int32)


def from_bits(bits: Tensor) -> Tensor:
    """The float32 tensor with these int32 bits, over the same memory."""
    return bits.view(torch.float32)


def power_of_two(field: Tensor) -> Tensor:
    """2^s in float32, exactly, from the exponent field (s + 127) 2^23 as int32, s in [-127, 127].

    The field of all ones, which is NaN as an E8M0 scale, gives NaN.
    """
    bits = field.clamp_min(_TWO_TO_MINUS_127_BITS)
    return from_bits(bits.masked_fill_(field == EXPONENT_WORD, NAN_BITS))


def inverse_power_of_two(field: Tensor) -> Tensor:
    """2^-s in float32, exactly, from the exponent field (s + 127) 2^23.

    The field of all ones gives 2^-127; no result may depend on it.
    """
    return from_bits((_FIELDS_OF_INVERSES - field).clamp_min_(_TWO_TO_MINUS_127_BITS))
