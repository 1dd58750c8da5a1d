"""Selects the quantisation kernel: the fastest that claims a tensor and its options, else the torch code.

CPU     cpu.c, compiled on first use
CUDA    Triton
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from quantexp.formats.kernels import cpu, gpu
from quantexp.formats.spec import QuantSpec


class Kernel(Protocol):
    """The functions of a device's kernel module."""

    def reads(self, x: Tensor) -> bool:
        """Whether `finite_amax` accepts such a tensor, with any strides."""

    def finite_amax(self, x: Tensor) -> Tensor:
        """The largest magnitude among the finite elements of the contiguous x, 0-dim float32."""

    def claims(self, x: Tensor, spec: QuantSpec) -> bool:
        """Whether `quantise` is exact for such a tensor, with any strides."""

    def claims_both(self, x: Tensor, spec: QuantSpec) -> bool:
        """Whether `quantise_both` is."""

    def quantise(
        self, x: Tensor, y: Tensor, spec: QuantSpec, axis: int, scale: Tensor | None
    ) -> None:
        """Write the quantised contiguous x to the contiguous y, which may be x itself."""

    def quantise_both(
        self, x: Tensor, columns: Tensor, rows: Tensor, spec: QuantSpec, axis: int
    ) -> None:
        """Write x quantised in blocks along `axis`, not the last, and along the last axis, from one read."""


#: By device type.
_KERNELS: dict[str, Kernel] = {"cpu": cpu, "cuda": gpu}
_torch_alone: ContextVar[bool] = ContextVar("torch_alone", default=False)


@contextmanager
def torch_alone() -> Iterator[None]:
    """Disable the kernels: the torch code, the reference, handles everything."""
    token = _torch_alone.set(True)
    try:
        yield
    finally:
        _torch_alone.reset(token)


def is_torch_alone() -> bool:
    """Whether the torch code handles everything: inside `torch_alone`, or while torch.compile traces."""
    return torch.compiler.is_compiling() or _torch_alone.get()


def kernel_for(x: Tensor, spec: QuantSpec) -> Kernel | None:
    """The kernel for a tensor; None means the torch code."""
    kernel = _kernel(x)
    return kernel if kernel is not None and kernel.claims(x, spec) else None


def kernel_for_both(x: Tensor, spec: QuantSpec) -> Kernel | None:
    """The kernel that writes both copies from one read; None means one read per copy."""
    kernel = _kernel(x)
    return kernel if kernel is not None and kernel.claims_both(x, spec) else None


def kernel_for_amax(x: Tensor) -> Kernel | None:
    """The kernel that computes a tensor's amax; None means the torch code."""
    kernel = _kernel(x)
    return kernel if kernel is not None and kernel.reads(x) else None


def _kernel(x: Tensor) -> Kernel | None:
    if is_torch_alone():
        return None
    return _KERNELS.get(x.device.type)
