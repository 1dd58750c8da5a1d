"""Products of 16-bit matrices on a CPU, through fp32 where the processor has no instructions for them.

Without such instructions torch multiplies bf16 or fp16 in a loop that takes up to 100 times as long as fp32. Inside
`through_fp32`, every caller's products run in three steps instead:

    y = round(a b)      a and b converted to fp32 (exact), multiplied and summed in fp32, rounded once to their dtype

Replacement kernels take the place of torch's CPU kernels of `mm`, `bmm`, `addmm`, `baddbmm` (with their `out=` and
in-place forms) and of the fused attention, forward and backward. They sit below autograd and below every
`TorchDispatchMode`, so autograd and the proof of engagement see the same calls with the same 16-bit operands.
Products with a vector keep torch's kernels, which take no longer than those of fp32. Products in other dtypes pass
through to torch's kernels, with about a microsecond of overhead.

The larger operand is converted in strips that fit in the caches, into memory that the next product reuses: at most
`SCRATCH_BYTES` per thread. The sum over K is never split.

    # M rows, N columns, K summed over; B products of a batch
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from quantexp.formats.torch_internals import without_torch_function

#: Bytes of a strip in fp32, of an operand or of the result.
STRIP_BYTES = 8 << 20
#: Bytes in fp32 of the operand that is converted once for all strips of the other.
KEPT_BYTES = 64 << 20
#: Scratch memory of one thread at most, unless a single row is longer than a strip.
SCRATCH_BYTES = KEPT_BYTES + 2 * STRIP_BYTES
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
#: One set of dtypes for each active `through_fp32`.
_active: list[frozenset[torch.dtype]] = []


def go_through_fp32(dtype: torch.dtype) -> bool:
    """Whether products of this dtype on a CPU currently go through fp32."""
    return any(dtype in dtypes for dtypes in _active)


@contextlib.contextmanager
def through_fp32(dtypes: Collection[torch.dtype]) -> Iterator[None]:
    """Products of these 16-bit dtypes on a CPU go through fp32 inside, in every thread; none if `dtypes` is empty."""
    if not dtypes:
        yield
        return
    kernels = _Kernels(frozenset(dtypes))
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _active.append(kernels.dtypes)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for name, kernel in kernels.by_name().items():
                library.impl(name, kernel, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        _active.remove(kernels.dtypes)
        library._destroy()  # type: ignore[no-untyped-call]


class _Scratch(threading.local):
    """One thread's fp32 memory, by use."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def empty(self, use: str, *shape: int) -> Tensor:
        """A contiguous tensor; the next call with the same use overwrites it."""
        numel = torch.Size(shape).numel()
        buffer = self.buffers.get(use)
        if buffer is None or buffer.numel() < numel:
            self.buffers.pop(use, None)
            buffer = self.buffers[use] = torch.empty(numel, dtype=torch.float32)
        return buffer[:numel].view(shape)

    def converted(self, use: str, x: Tensor) -> Tensor:
        """x in fp32; a transposed matrix stays transposed."""
        if x.stride(-2) == 1 and x.stride(-1) != 1:
            return self.converted(use, x.mT).mT
        return self.empty(use, *x.shape).copy_(x)


#: Finishes a strip's product in fp32, given the strip's position in the result.
_Finish = Callable[[Tensor, tuple[slice, ...]], Tensor]


class _Kernels:
    """The replacement kernels; each passes dtypes other than `dtypes` to torch's own kernel."""

    def __init__(self, dtypes: frozenset[torch.dtype]) -> None:
        self.dtypes = dtypes
        self.scratch = _Scratch()
        self.native: dict[str, Any] = {}

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """Every replacement kernel by its operator's name."""
        kernels: dict[str, Callable[..., Any]] = {}
        for name, dim in (("mm", 2), ("bmm", 3)):
            kernels[name] = self._plain(name, dim)
            kernels[f"{name}.out"] = self._plain(f"{name}.out", dim)
        for name, dim in (("addmm", 2), ("baddbmm", 3)):
            for form in (name, f"{name}.out", f"{name}_"):
                kernels[form] = self._added(form, dim)
        kernels[_ATTENTION] = self._attention(_ATTENTION)
        kernels[f"{_ATTENTION}_backward"] = self._attention(f"{_ATTENTION}_backward")
        self.native = {name: get_kernel(f"aten::{name}", "CPU") for name in kernels}
        return kernels

    def _plain(self, name: str, dim: int) -> Callable[..., Any]:
        """`mm` or `bmm`."""

        def multiply(keyset: Any, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Any:
            if not self._takes(a, b, dim, out):
                arguments = {} if out is None else {"out": out}
                return self.native[name].call_boxed(keyset, a, b, **arguments)
            with without_torch_function():
                return self._product(keyset, a, b, out, lambda strip, at: strip)

        return multiply

    def _added(self, name: str, dim: int) -> Callable[..., Any]:
        """`addmm` or `baddbmm`: beta c + alpha a b."""
        in_place = name.endswith("_")

        def multiply(
            keyset: Any,
            c: Tensor,
            a: Tensor,
            b: Tensor,
            *,
            beta: float = 1,
            alpha: float = 1,
            out: Tensor | None = None,
        ) -> Any:
            target = c if in_place else out
            if c.dtype != a.dtype or not self._takes(a, b, dim, target):
                arguments = {} if out is None else {"out": out}
                return self.native[name].call_boxed(
                    keyset, c, a, b, beta=beta, alpha=alpha, **arguments
                )
            with without_torch_function():
                c_MN = c.expand(*a.shape[:-1], b.shape[-1])

                def finish(strip: Tensor, at: tuple[slice, ...]) -> Tensor:
                    scaled = strip if alpha == 1 else strip.mul_(alpha)
                    return scaled if beta == 0 else scaled.add_(c_MN[at], alpha=beta)

                return self._product(keyset, a, b, target, finish)

        return multiply

    def _attention(self, name: str) -> Callable[..., Any]:
        """The fused attention or its backward: every 16-bit tensor converted, every result rounded once."""

        def attend(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            dtype = args[0].dtype
            if dtype not in self.dtypes:
                return self.native[name].call_boxed(keyset, *args, **kwargs)

            def wide(x: Any) -> Any:
                return x.float() if isinstance(x, Tensor) and x.dtype == dtype else x

            with without_torch_function():
                results = self.native[name].call_boxed(
                    keyset, *map(wide, args), **{key: wide(x) for key, x in kwargs.items()}
                )
                if name.endswith("_backward"):
                    return tuple(x.to(dtype) for x in results)
                o, logsumexp = results
                return o.to(dtype), logsumexp

        return attend

    def _takes(self, a: Tensor, b: Tensor, dim: int, out: Tensor | None) -> bool:
        """Whether the replacement handles a product; torch's own kernel handles invalid and empty ones."""
        return (
            a.dtype in self.dtypes
            and a.dtype == b.dtype
            and a.dim() == b.dim() == dim
            and a.shape[-1] == b.shape[-2]
            and a.shape[:-2] == b.shape[:-2]
            and a.numel() > 0
            and b.numel() > 0
            and (
                out is None or (out.dtype == a.dtype and out.shape == (*a.shape[:-1], b.shape[-1]))
            )
        )

    def _product(
        self, keyset: Any, a: Tensor, b: Tensor, out: Tensor | None, finish: _Finish
    ) -> Tensor:
        y = a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out
        if a.dim() == 2:
            self._matrix(keyset, y, a, b, finish)
        else:
            self._batch(keyset, y, a, b, finish)
        return y

    def _matrix(
        self, keyset: Any, y_MN: Tensor, a_MK: Tensor, b_KN: Tensor, finish: _Finish
    ) -> None:
        """Convert the smaller operand once and the larger one strip by strip, over rows or columns of the result."""
        by_rows = a_MK.numel() >= b_KN.numel()
        M, K = a_MK.shape
        N = b_KN.shape[1]
        across, along = (M, N) if by_rows else (N, M)
        for fixed_part in _parts(along, KEPT_BYTES, K):
            fixed = None
            for strip in _parts(across, STRIP_BYTES, max(K, fixed_part.stop - fixed_part.start)):
                at = (strip, fixed_part) if by_rows else (fixed_part, strip)
                rows, columns = at
                if fixed is None:
                    fixed = self.scratch.converted(
                        "kept", b_KN[:, columns] if by_rows else a_MK[rows]
                    )
                part = self.scratch.converted("strip", a_MK[rows] if by_rows else b_KN[:, columns])
                left, right = (part, fixed) if by_rows else (fixed, part)
                product = self.scratch.empty("product", left.shape[0], right.shape[1])
                self.native["mm.out"].call_boxed(keyset, left, right, out=product)
                y_MN[at].copy_(finish(product, at))

    def _batch(
        self, keyset: Any, y_BMN: Tensor, a_BMK: Tensor, b_BKN: Tensor, finish: _Finish
    ) -> None:
        """Process as many matrices at a time as fit in a strip; larger ones one by one."""
        B, M, K = a_BMK.shape
        N = b_BKN.shape[2]
        largest = max(M * K, K * N, M * N)
        if largest * 4 > STRIP_BYTES:
            for i in range(B):

                def of_one(
                    product: Tensor, at: tuple[slice, ...], here: slice = slice(i, i + 1)
                ) -> Tensor:
                    return finish(product[None], (here, *at))[0]

                self._matrix(keyset, y_BMN[i], a_BMK[i], b_BKN[i], of_one)
            return
        for batch in _parts(B, STRIP_BYTES, largest):
            a = self.scratch.converted("kept", a_BMK[batch])
            b = self.scratch.converted("strip", b_BKN[batch])
            product = self.scratch.empty("product", a.shape[0], M, N)
            self.native["bmm.out"].call_boxed(keyset, a, b, out=product)
            y_BMN[batch].copy_(finish(product, (batch,)))


def _parts(extent: int, limit: int, width: int) -> Iterator[slice]:
    """Equal parts of an extent, each with as many rows of `width` floats as fit in `limit` bytes."""
    most = max(1, limit // (4 * width))
    number = -(-extent // most)
    length = -(-extent // number)
    for start in range(0, extent, length):
        yield slice(start, min(start + length, extent))
