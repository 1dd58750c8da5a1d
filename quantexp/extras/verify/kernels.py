"""The kernels under test: name, implementation, and claims. A new kernel is an entry of `KERNELS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import FORMATS, Format, decode, encode, hadamard, quantise
from quantexp.formats.kernels import cpu, gpu, torch_alone


@dataclass(frozen=True)
class Kernel:
    """One implementation of the formats, with the signatures of `quantexp.formats`.

    An operation that it does not have is None, and is not tested.
    """

    name: str
    #: Device types that it runs on.
    devices: tuple[str, ...]
    #: Formats that it claims to implement bit for bit.
    formats: frozenset[str]
    quantise: Callable[..., Tensor]
    #: Returns codes and scales.
    encode: Callable[..., tuple[Tensor, Any]] | None = None
    decode: Callable[..., Tensor] | None = None
    hadamard: Callable[..., Tensor] | None = None
    #: Whether it is available on this machine.
    is_available: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Placed:
    """A kernel on a device."""

    kernel: Kernel
    device: str

    @property
    def label(self) -> str:
        """The name in the table."""
        return f"{self.kernel.name} ({self.device})"


def _by_torch(x: Tensor, fmt: str | Format, **options: Any) -> Tensor:
    with torch_alone():
        return quantise(x, fmt, **options)


_ALL = frozenset(FORMATS)
KERNELS = (
    Kernel("reference", ("cpu", "cuda"), _ALL, _by_torch, encode, decode, hadamard),
    Kernel(
        "compiled",
        ("cpu",),
        frozenset(name for name, fmt in FORMATS.items() if fmt.family in cpu.FAMILIES),
        quantise,
        is_available=lambda: cpu.functions() is not None,
    ),
    Kernel(
        "triton",
        ("cuda",),
        frozenset(name for name, fmt in FORMATS.items() if fmt.family in gpu.FAMILIES),
        quantise,
        is_available=lambda: (
            torch.cuda.is_available() and gpu.obstacle(torch.device("cuda", 0)) is None
        ),
    ),
)
