"""What a tensor is to torch, and all that quantexp takes from `torch._C`.

A kernel reads memory, so it serves *plain* tensors, whose memory contains their values. It would not see the sign of a
lazily negated view, the batch of `torch.func.vmap`, the values of a fake tensor (there are none), or that a tracer
records the call. Such calls go through torch's dispatcher instead (see `operators`), and what no dispatcher can turn
into plain memory is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKeySet, _TorchDispatchModeKey
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore
from torch.autograd import forward_ad

from quantexp.formats.layout import INPUT_DTYPES, positive_axis

_P = ParamSpec("_P")
_R = TypeVar("_R")

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "TCPStore",
    "allowed_dtypes",
    "beside_modes",
    "check_amax_tensor",
    "check_constant",
    "check_dense",
    "check_derivative",
    "check_input",
    "checked_axis",
    "constant",
    "current_autograd_node",
    "has_tracing_mode",
    "in_backward",
    "included_keys",
    "is_batch",
    "is_plain",
    "is_transformed",
    "key_mask",
    "keys_of",
    "needs_derivative",
    "under_transform",
    "unseen",
    "without_torch_function",
]

#: A context in which `__torch_function__` modes and subclasses are not called, for an operation that only we see.
without_torch_function = torch._C.DisableTorchFunction


def beside_modes(work: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function without `__torch_function__` modes, which cost a call for each attribute of a tensor."""

    @wraps(work)
    def without_modes(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with without_torch_function():
            return work(*args, **kwargs)

    return without_modes


class unseen:  # noqa: N801  (a context manager, and faster than a generator)
    """A context for a watcher's own operations: without derivatives, and seen by no mode and no subclass."""

    def __enter__(self) -> None:
        self._guards = torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch()
        for guard in self._guards:
            guard.__enter__()
        self._had_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # modes of `__torch_function__` would see it

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._had_gradients)
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


def current_autograd_node() -> torch.autograd.graph.Node | None:
    """The node whose backward is running on this thread; None outside of a backward."""
    return torch._C._current_autograd_node()


def in_backward() -> bool:
    """Whether a backward is running on this thread; in a forward this means that it is recomputed."""
    return torch._C._current_autograd_node() is not None


def key_mask(*names: str) -> int:
    """The keys of torch's dispatcher with these names, as bits."""
    mask = 0
    for name in names:
        mask |= DispatchKeySet(torch._C._dispatch_key_parse(name)).raw_repr()
    return mask


def keys_of(x: Tensor) -> int:
    """The keys by which the dispatcher chooses what an operation does with x, as bits."""
    return torch._C._dispatch_keys(x).raw_repr()


def included_keys() -> int:
    """The keys that this thread adds to those of every tensor, as bits."""
    return torch._C._dispatch_tls_local_include_set().raw_repr()


#: The modes of torch that trace, unlike those of a program, which may watch a call in any way.
_TRACING_MODES = (
    _TorchDispatchModeKey.FAKE,
    _TorchDispatchModeKey.PROXY,
    _TorchDispatchModeKey.FUNCTIONAL,
)


def has_tracing_mode() -> bool:
    """Whether a mode of torch's own records this thread's operations or computes shapes alone."""
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING_MODES)


def is_transformed(x: Tensor) -> bool:
    """Whether a transform of `torch.func` wraps x."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def under_transform(x: Tensor) -> Tensor:
    """The tensor that the outermost wrapper of x contains."""
    return torch._C._functorch.get_unwrapped(x)


def is_batch(x: Tensor) -> bool:
    """Whether the outermost wrapper of x is that of `torch.func.vmap`."""
    return torch._C._functorch.is_batchedtensor(x)


#: Any other key of a tensor has a meaning that its memory does not show.
_NOT_PLAIN = ~key_mask(
    "CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"
)
_PYTHON = key_mask("Python")
_TRACERS = key_mask("PreDispatch", "Tracer")


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether the memory of all contains their values, and nothing traces; None counts as plain."""
    if torch.compiler.is_compiling():
        return False
    for x in tensors:
        if x is not None and keys_of(x) & _NOT_PLAIN:
            return False
    return not _is_traced()


def _is_traced() -> bool:
    """Whether torch.jit.trace, make_fx or the like records the operations."""
    keys = included_keys()
    return bool(keys & _TRACERS) or bool(keys & _PYTHON and has_tracing_mode())


def check_input(x: object) -> None:
    """Refuse what cannot be quantised.

    Raises:
        TypeError: not a tensor; not one of bfloat16, float16 and float32; or sparse, nested, distributed or without
            values.
    """
    if type(x) is Tensor and _is_dense(x) and x.dtype in INPUT_DTYPES:
        return
    check_dense(x, "x")
    assert isinstance(x, Tensor)
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"cannot quantise {x.dtype}: must be one of {allowed_dtypes()}; {_remedy_of_dtype(x.dtype)}"
        )


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and not x.is_meta


def check_dense(x: object, name: str) -> None:
    """Refuse what is not a dense tensor with values.

    Raises:
        TypeError: anything else; names the remedy.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got a {type(x).__name__}: convert it with torch.as_tensor"
        )
    for applies, kind, remedy in _REFUSED:
        if applies(x):
            raise TypeError(f"{name} must be a dense tensor, got a {kind} one: {remedy(name)}")


_REFUSED: tuple[tuple[Callable[[Tensor], bool], str, Callable[[str], str]], ...] = (
    (
        lambda x: x.is_nested,
        "nested",
        lambda name: f"pass each part of {name}.unbind(), or {name}.to_padded_tensor(0.0)",
    ),
    (
        lambda x: x.layout is not torch.strided,
        "sparse",
        lambda name: f"pass {name}.to_dense(), or the values alone",
    ),
    (
        lambda x: x.is_meta,
        "meta",
        lambda name: f"{name} has no values, so load them, or trace shapes with FakeTensorMode",
    ),
    (
        lambda x: (
            not torch.compiler.is_compiling()
            and type(x).__module__.startswith("torch.distributed.tensor")
        ),
        "distributed",
        lambda name: (
            f"pass {name}.full_tensor(), or {name}.to_local() if no block lies in two shards"
        ),
    ),
)


def _remedy_of_dtype(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "quantise torch.view_as_real(x)"
    if str(dtype).startswith("torch.q"):
        return "pass x.dequantize()"
    return "convert it with x.float()"


def allowed_dtypes() -> str:
    """The dtypes that can be quantised, for messages."""
    return ", ".join(str(dtype) for dtype in INPUT_DTYPES)


def needs_derivative(x: Tensor) -> bool:
    """Whether autograd, forward or backward, follows x at any level of `torch.func`."""
    if torch.compiler.is_compiling():  # which shows no levels
        is_followed = x.requires_grad and torch.is_grad_enabled()
        return is_followed or _has_tangent(x)
    while True:
        if x.requires_grad and torch.is_grad_enabled():
            return True
        if _has_tangent(x):
            return True
        if not is_transformed(x):
            return False
        x = under_transform(x)


def _has_tangent(x: Tensor) -> bool:
    if forward_ad._current_level < 0 or is_batch(x):
        return False
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def check_derivative(x: Tensor, straight_through: bool, out: object = None) -> bool:
    """Whether a derivative with respect to x is needed.

    Raises:
        RuntimeError: it is, but there is none, or an `out` to write to.
    """
    if not needs_derivative(x):
        return False
    if not straight_through:
        raise RuntimeError(
            "x requires a gradient, and rounding has none: pass straight_through=True to use the identity, or "
            "x.detach()"
        )
    if out is not None:
        raise RuntimeError(
            "x requires a gradient, which does not pass through out: leave out away, or pass x.detach()"
        )
    return True


def constant(x: Tensor) -> Tensor:
    """x for a function without derivatives. A view of a detached tensor costs more than one of the tensor."""
    return x.detach() if x.requires_grad or forward_ad._current_level >= 0 else x


def check_constant(x: Tensor, name: str) -> None:
    """Refuse an argument whose derivative would be dropped.

    Raises:
        RuntimeError: autograd follows it.
    """
    if needs_derivative(x):
        raise RuntimeError(
            f"{name} requires a gradient, and there is none with respect to it: pass {name}.detach()"
        )


def checked_axis(x: Tensor, axis: int, amax: Tensor | None) -> int:
    """The axis of a valid input, counted from the front.

    Raises:
        TypeError: as `check_input`, `check_amax_tensor` and `positive_axis`.
        ValueError: there is no such axis.
    """
    check_input(x)
    check_amax_tensor(amax)
    return positive_axis(axis, x.ndim)


def check_amax_tensor(amax: object) -> None:
    """Refuse an amax that is not a constant real number in a dense 0-dim tensor; None passes.

    Raises:
        TypeError: not a dense tensor, or complex.
        ValueError: another number of dimensions.
        RuntimeError: a derivative is needed with respect to it.
    """
    if amax is None:
        return
    check_dense(amax, "amax")
    assert isinstance(amax, Tensor)
    if amax.ndim != 0:
        raise ValueError(f"amax must be a 0-dim tensor, got shape {tuple(amax.shape)}")
    if amax.is_complex():
        raise TypeError(f"amax must be real, got {amax.dtype}: pass amax.abs()")
    check_constant(amax, "amax")
