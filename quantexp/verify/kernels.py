"""The kernels there are: what quantises, by name, and what each claims. A new one is an entry of `KERNELS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantexp.formats import FORMATS, decode, encode, hadamard, quantise


@dataclass(frozen=True)
class Kernel:
    """One implementation of the formats, with the signatures of `quantexp.formats`."""

    name: str
    #: types of device it runs on.
    devices: tuple[str, ...]
    #: formats that it claims to follow bit for bit.
    formats: frozenset[str]
    quantise: Callable[..., Tensor]
    #: codes and scales.
    encode: Callable[..., tuple[Tensor, Any]]
    decode: Callable[..., Tensor]
    hadamard: Callable[..., Tensor]


KERNELS = (
    Kernel("reference", ("cpu", "cuda"), frozenset(FORMATS), quantise, encode, decode, hadamard),
)
