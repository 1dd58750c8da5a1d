"""Quantisation kernels, exact for everything they claim: which serves a tensor, and the mode of the processor.

    cpu       C, compiled on first use (cpu.c)
    gpu       Triton, on CUDA devices

The torch code of `quantexp.formats` is the reference and handles what no kernel claims. A kernel's values equal the
reference's bit for bit; all NaN count as equal.

After `torch.set_flush_denormal(True)`, and after loading some libraries built with -ffast-math, a CPU takes subnormal
numbers for zero. MX scales of 2^-127 are subnormal, so even normal numbers would become zero. The mode belongs to a
thread: a thread of torch's pool has that of the thread that started it, whatever was set since.

The compiled kernels change the mode in each of their threads, and restore it. `exact` does so in the calling thread,
and `exact_in_pool` in torch's threads too, for code that shares its work among them. Without the compiled library the
pool's mode can only be tested, and flushing is an error.

A forked process has no threads but its first, and torch would wait for the others for ever: `exact` sets torch's number
of threads to one there, unless `keep_threads` says that there were none to lose.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from quantexp.formats.kernels import cpu
from quantexp.formats.layout import Draw, Transform
from quantexp.formats.spec import QuantSpec

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Not written as one constant expression, which Python would evaluate once.
_SMALLEST_NORMAL = 2.0**-1022
#: Elements from which torch shares an operation among its threads (at::internal::GRAIN_SIZE).
_GRAIN = 1 << 15
_is_forked = False
_torch_alone: ContextVar[bool] = ContextVar("torch_alone", default=False)


class Kernel(Protocol):
    """The functions of a device's kernel module."""

    def reads(self, x: Tensor) -> bool:
        """Whether `finite_amax` accepts such a tensor, with any strides."""

    def finite_amax(self, x: Tensor, axis: int = 0, transform: Transform | None = None) -> Tensor:
        """The largest magnitude among the finite elements of the contiguous x, or its transform, 0-dim float32."""

    def claims(self, x: Tensor, spec: QuantSpec, transform: Transform | None = None) -> bool:
        """Whether `quantise` is exact for such a tensor, with these strides."""

    def claims_both(self, x: Tensor, spec: QuantSpec) -> bool:
        """Whether `quantise_both` is."""

    def quantise(
        self,
        x: Tensor,
        y: Tensor,
        spec: QuantSpec,
        axis: int,
        scale: Tensor | None,
        draw: Draw | None = None,
        transform: Transform | None = None,
    ) -> None:
        """Write the quantised contiguous x to the contiguous y, which may be x itself.

        `draw` is for stochastic rounding; x is transformed first if there is a transform.
        """

    def quantise_both(
        self,
        x: Tensor,
        columns: Tensor,
        rows: Tensor,
        spec: QuantSpec,
        axis: int,
        scale: Tensor | None = None,
    ) -> None:
        """Write x quantised in blocks along `axis`, not the last, and along the last axis, from one read."""


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


def kernel_for(x: Tensor, spec: QuantSpec, transform: Transform | None = None) -> Kernel | None:
    """The kernel for a tensor, after a transform if there is one; None means the torch code."""
    kernel = _kernel(x)
    return kernel if kernel is not None and kernel.claims(x, spec, transform) else None


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
    if x.device.type == "cpu":
        return cpu
    if x.device.type == "cuda":
        from quantexp.formats.kernels import gpu

        return gpu
    return None


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_note_fork)


def keep_threads() -> None:
    """In a forked process: its parent had started no thread of torch, so torch may start its own here."""
    global _is_forked
    _is_forked = False


def is_flushing() -> bool:
    """Whether the calling thread flushes subnormal numbers."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


def exact(work: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function with exact arithmetic in the calling thread."""

    @wraps(work)
    def in_exact_mode(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _is_forked:
            _use_one_thread()
        if not is_flushing():
            return work(*args, **kwargs)
        torch.set_flush_denormal(False)
        try:
            return work(*args, **kwargs)
        finally:
            torch.set_flush_denormal(True)

    return in_exact_mode


def _use_one_thread() -> None:
    global _is_forked
    torch.set_num_threads(1)
    _is_forked = False


def exact_in_pool(
    work: Callable[Concatenate[Tensor, _P], _R],
) -> Callable[Concatenate[Tensor, _P], _R]:
    """The function with exact arithmetic also in torch's threads, if they share the work on its first argument."""

    @wraps(work)
    @torch.no_grad()  # not for its meaning: views are cheaper
    def in_exact_mode(x: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if x.device.type != "cpu" or x.numel() < _GRAIN or torch.get_num_threads() == 1:
            return work(x, *args, **kwargs)
        with _exact_pool():
            return work(x, *args, **kwargs)

    return exact(in_exact_mode)


@contextmanager
def _exact_pool() -> Iterator[None]:
    """Change the mode of torch's threads, and restore it.

    Raises:
        RuntimeError: they flush, and the compiled library is missing.
    """
    num_threads = torch.get_num_threads()
    compiled = cpu.functions()
    if compiled is None or not compiled.shares_work:
        _refuse_flushing_pool(num_threads)
        yield
    elif not compiled.make_threads_exact(num_threads):
        yield
    else:
        try:
            yield
        finally:
            compiled.restore_threads(num_threads)


def _refuse_flushing_pool(num_threads: int) -> None:
    smallest = torch.full(
        (num_threads * _GRAIN,), torch.finfo(torch.float32).tiny, dtype=torch.float32, device="cpu"
    )
    if not smallest.mul_(0.5).view(torch.int32).all():
        raise RuntimeError(
            "torch's threads flush subnormal numbers to zero, because torch.set_flush_denormal(True) was called before "
            "they started: leave it out, call torch.set_num_threads(1), or install a C compiler"
        )
