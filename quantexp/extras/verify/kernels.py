"""The kernels under test: name, implementation, claims; runs a case on one. A new kernel is an entry of `KERNELS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantexp.extras.verify.exact import Answer, Case
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

    def rounds(self, rounding: str) -> bool:
        """Whether it is its own code that rounds so."""
        return self.kernel.name == "reference" or rounding != "zero"


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


Array = NDArray[Any]

#: Options that decoding shares with encoding.
_SHARED = ("block",)


@dataclass(frozen=True)
class Reply:
    """A kernel's results for a case."""

    answer: Answer
    #: The decoded values of its own codes and scales; None if the format or the kernel has none.
    decoded: Array | None


def ask(kernel: Kernel, device: str, case: Case) -> Reply:
    """Quantise, encode, and decode the encoded codes."""
    x = to_torch(case.x, case.dtype, device)
    if case.strided:
        order = list(reversed(range(x.ndim)))
        x = x.permute(order).contiguous().permute(order)
    options = dict(case.options)
    if "amax" in options:
        options["amax"] = torch.tensor(options["amax"], dtype=torch.float32, device=device)
    values = to_numpy(kernel.quantise(x, case.fmt, axis=case.axis, **options))
    if case.fmt == "bf16" or kernel.encode is None or kernel.decode is None:
        return Reply(Answer(values), None)
    packing = {"packed": True} if case.packed else {}
    codes, scales = kernel.encode(x, case.fmt, axis=case.axis, **packing, **options)
    shared = {name: options[name] for name in _SHARED if name in options}
    if case.packed:
        shared.update(packed=True, extent=case.x.shape[case.axis])
    decoded = kernel.decode(codes, scales, case.fmt, axis=case.axis, dtype=x.dtype, **shared)
    block, tensor = scales if isinstance(scales, tuple) else _one_of(scales)
    answer = Answer(
        values,
        to_numpy(codes),
        None if block is None else to_numpy(block),
        None if tensor is None else np.float32(tensor.item()),
    )
    return Reply(answer, to_numpy(decoded))


def _one_of(scales: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return (scales, None) if scales.dtype == torch.uint8 else (None, scales)


def to_torch(x: Array, dtype: str, device: str) -> Tensor:
    """The values in a dtype that represents them, on a device."""
    values = torch.from_numpy(np.array(x, dtype=np.uint8 if x.dtype == np.uint8 else np.float32))
    return values.to(device) if x.dtype == np.uint8 else values.to(getattr(torch, dtype)).to(device)


def to_numpy(x: Tensor) -> Array:
    """The values as float32, or the codes as uint8."""
    return np.asarray((x if x.dtype == torch.uint8 else x.float()).cpu().numpy())


def packed(codes: Array, axis: int) -> Array:
    """Two four-bit codes per byte along an axis, the first in the lower half; an odd last code is alone."""
    lines = np.moveaxis(codes, axis, -1)
    lines = np.pad(lines, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[axis] % 2)])
    pairs: Array = lines[..., ::2] | lines[..., 1::2] << 4
    return np.moveaxis(pairs, -1, axis).astype(np.uint8)
