"""Runs Megatron-Core on a machine without CUDA.

`cpu_device()` is a context manager. With CUDA it does nothing. Without CUDA, inside the context:

- `torch.cuda`'s device, stream and random-number functions act on the CPU, since Megatron calls them unconditionally
  (rotary embedding, DistributedDataParallel, `model_parallel_cuda_manual_seed`);
- a `TorchFunctionMode` reads the device "cuda" as "cpu". `Tensor.cuda()` returns the tensor itself, and `Tensor.type()`
  returns `torch.cuda.*`, which Megatron's mixed-precision optimizer requires. The mode also applies to the backward
  pass, where forwards are recomputed;
- collectives accept tensors of unlike first extents, which the dispatcher of experts exchanges, and gloo refuses: every
  rank knows every extent, so they are padded with zeros to the longest, and cut again;
- the optimizer step allocates no temporary the size of a weight, with the same bits.

On exit everything is restored, also after an error. The context changes the location of tensors, never their values.

Each operation of torch's Adam reads a whole tensor from memory, and two of them allocate a temporary of its size, whose
pages the system maps and unmaps in every step. Adam is elementwise, so `adam_in_strips` calls torch's function on parts
that stay in the caches. Megatron-Core's multiplication of tensors by a scalar allocates a third temporary; `scale_each`
allocates none unless the dtypes differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import adam as torch_adam
from torch.overrides import TorchFunctionMode

from quantexp.formats.torch_internals import without_torch_function


class _Stream:
    """A stand-in for a CUDA stream. The CPU executes in order, so waiting is a no-op."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """No-op."""

    def wait_event(self, event: object) -> None:
        """No-op."""

    def synchronize(self) -> None:
        """No-op."""

    def record_event(self, event: object = None) -> _Event:
        """A completed event."""
        return _Event()


class _Event:
    """A stand-in for a CUDA event that is always complete."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """No-op."""

    def wait(self, stream: object = None) -> None:
        """No-op."""

    def synchronize(self) -> None:
        """No-op."""

    def query(self) -> bool:
        """True: the event is complete."""
        return True


#: Looked up once, since the mode runs at every torch call.
_CUDA, _TYPE, _TO, _CPU = torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to, torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Reads the device "cuda" as "cpu" in every torch function."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _CUDA:
            return args[0]
        if func is _TYPE and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        if func is _TO and any(_is_cuda(a) for a in args[1:]):
            args = tuple(_CPU if _is_cuda(a) else a for a in args)
        if not kwargs:
            return func(*args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):  # for a copy to a GPU
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _set_cpu_rng_state(state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


@contextlib.contextmanager
def _same_stream(stream: object) -> Iterator[None]:
    yield


def padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """x with rows of zeros up to a number of rows."""
    result = x.new_zeros(length, *x.shape[1:])
    result[: len(x)] = x
    return result


def gathering_unlike(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.all_gather`, also for tensors with unlike first extents."""

    def gather(tensors: list[torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths = [len(each) for each in tensors]
        if len(set(lengths)) == 1:
            return all_gather(tensors, x, *args, **kwargs)
        buffers = [x.new_empty(max(lengths), *x.shape[1:]) for _ in tensors]
        all_gather(buffers, padded(x, max(lengths)), *args, **kwargs)
        for each, buffer in zip(tensors, buffers, strict=True):
            each.copy_(buffer[: len(each)])
        return None

    return gather


def scattering_unlike(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.reduce_scatter`, also for tensors with unlike first extents."""

    def scatter(output: torch.Tensor, inputs: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        lengths = [len(each) for each in inputs]
        if len(set(lengths)) == 1:
            return reduce_scatter(output, inputs, *args, **kwargs)
        buffer = output.new_empty(max(lengths), *output.shape[1:])
        reduce_scatter(buffer, [padded(x, max(lengths)) for x in inputs], *args, **kwargs)
        output.copy_(buffer[: len(output)])
        return None

    return scatter


def _replacements() -> list[tuple[ModuleType, str, object]]:
    """The replacements without CUDA: (module, name, replacement)."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as megatron_optimizer
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    def no_op(*args: object, **kwargs: object) -> None:
        """A CUDA function without a counterpart on the CPU."""

    def on_host(x: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return x.numpy() if as_numpy and torch.is_tensor(x) else x

    def get_rng_state(device: object = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    return [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", no_op),
        (torch.cuda, "empty_cache", no_op),
        (torch.cuda, "get_rng_state", get_rng_state),
        (torch.cuda.random, "get_rng_state", get_rng_state),
        (torch.cuda, "set_rng_state", _set_cpu_rng_state),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "default_stream", _Stream),
        (torch.cuda, "stream", _same_stream),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Event),
        (megatron_random, "_set_cuda_rng_state", _set_cpu_rng_state),
        (torch.distributed, "all_gather", gathering_unlike(torch.distributed.all_gather)),
        (torch.distributed, "reduce_scatter", scattering_unlike(torch.distributed.reduce_scatter)),
        (token_dispatcher, "maybe_move_tensor_to_cpu", on_host),
        (torch_adam, "adam", adam_in_strips),
        (clip_grads, "multi_tensor_scale_impl", scale_each),
        (megatron_optimizer, "multi_tensor_scale_impl", scale_each),
    ]


#: The function that `torch.autograd.backward` calls to run the engine.
_BACKWARD = "_engine_run_backward"


def _with_mode(mode: _CudaMeansCpu, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to enable the mode, which torch disables while it handles `backward`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def cpu_device() -> Iterator[None]:
    """Let Megatron-Core run on the CPU inside this context; no-op if CUDA is available."""
    if torch.cuda.is_available():
        yield
        return
    before: list[tuple[ModuleType, str, object]] = []
    try:
        for module, name, replacement in _replacements():
            before.append((module, name, getattr(module, name)))
            setattr(module, name, replacement)
        mode = _CudaMeansCpu()
        run_backward = getattr(torch.autograd, _BACKWARD)
        before.append((torch.autograd, _BACKWARD, run_backward))
        setattr(torch.autograd, _BACKWARD, _with_mode(mode, run_backward))
        with mode:
            yield
    finally:
        for module, name, original in reversed(before):
            setattr(module, name, original)


#: Elements of a strip: 1 MiB in float32.
STRIP = 1 << 18
_adam: Any = torch_adam.adam


def adam_in_strips(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    **options: Any,
) -> None:
    """`torch.optim.adam.adam` in strips; with amsgrad or tensors that are not contiguous, torch's function itself."""
    rows = list(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True))
    if options["amsgrad"] or not all(x.is_contiguous() for row in rows for x in row):
        _adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, **options)
        return
    with without_torch_function():
        for row, step in zip(rows, state_steps, strict=True):
            parts = [torch.split(x.detach().view(-1), STRIP) for x in row]
            before = step.clone()
            for strips in zip(*parts, strict=True):
                step.copy_(before)  # each call increments the step
                _adam(*([strip] for strip in strips), [], [step], **options)


def scale_each(
    chunk_size: int, overflow: Tensor, tensor_lists: list[list[Tensor]], scale: float
) -> None:
    """Megatron's `local_multi_tensor_scale`: sets each tensor of the second list to one of the first times `scale`."""
    for source, target in zip(*tensor_lists, strict=True):
        if scale == 1.0:
            target.copy_(source)
        elif source.dtype == target.dtype:
            torch.mul(source, scale, out=target)
        else:
            target.copy_(source * scale)
