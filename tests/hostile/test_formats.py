"""Attacks on the functions of `quantexp.formats`: what they are given, and the state that torch is in.

The oracle is the same call for a plain contiguous tensor, which `quantexp verify` compares with exact arithmetic.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantexp.extras.verify.rational import MX_ELEMENTS
from quantexp.formats import FORMATS, quantise

from .format_calls import (
    CALLS,
    DTYPES,
    any_call,
    any_shape,
    any_values,
    assert_same_result,
)

Cases = Iterator[random.Random]


class Subclass(Tensor):
    """A tensor with methods of its own."""


def _quantized(x: Tensor) -> Tensor:
    scale, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    return torch.quantize_per_channel(
        x, scale.expand(x.shape[0]), zero.expand(x.shape[0]), 0, torch.qint8
    )


#: What is no dense tensor of bf16, fp16 or fp32, from one that is.
NO_INPUT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a list": (lambda x: x.tolist(), "x must be a torch.Tensor, got a list: convert it with"),
    "an array": (lambda x: x.numpy(), "x must be a torch.Tensor, got a ndarray: convert it with"),
    "a number": (
        lambda x: np.float32(1),
        "x must be a torch.Tensor, got a float32: convert it with",
    ),
    "nothing": (lambda x: None, "x must be a torch.Tensor, got a NoneType: convert it with"),
    "COO": (lambda x: x.to_sparse(), r"got a sparse one: pass x\.to_dense\(\)"),
    "CSR": (lambda x: x.to_sparse_csr(), r"got a sparse one: pass x\.to_dense\(\)"),
    "MKL-DNN": (lambda x: x.to_mkldnn(), r"got a sparse one: pass x\.to_dense\(\)"),
    "meta": (lambda x: x.to("meta"), "got a meta one: x has no values, so load them, or trace"),
    "nested": (
        lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
        r"got a nested one: pass each part of x\.unbind",
    ),
    "quantised": (_quantized, r"cannot quantise torch\.qint8: must be one of .*x\.dequantize\(\)"),
    "complex": (lambda x: x.to(torch.complex64), r"complex64.*quantise torch\.view_as_real\(x\)"),
    "float8": (
        lambda x: x.to(torch.float8_e4m3fn),
        r"float8_e4m3fn: must be one of .*x\.float\(\)",
    ),
    **{
        str(dtype): (
            partial(Tensor.to, dtype=dtype),
            rf"cannot quantise {dtype}: must be one of",
        )
        for dtype in (torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool)
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NO_INPUT)
def test_what_is_no_dense_tensor_of_an_allowed_dtype_is_a_type_error(
    kind: str, cases: Cases
) -> None:
    make, words = NO_INPUT[kind]
    for case in cases:
        call = any_call(case, 2)
        x = make(any_values(case, (case.randrange(2, 5), 32), torch.float32))
        with pytest.raises(TypeError, match=words):
            call(x)


def any_view(case: random.Random, x: Tensor) -> Tensor:
    """A view with the values of some contiguous tensor, in any layout."""
    for _ in range(case.randrange(1, 4)):
        axis = case.randrange(x.ndim) if x.ndim else 0
        match case.choice(
            ("permute", "expand", "step", "unsqueeze", "negate", "fold", "zeros", "select")
        ):
            case "permute":
                x = x.permute(case.sample(range(x.ndim), x.ndim))
            case "expand":
                x = x.unsqueeze(axis).expand(*x.shape[:axis], case.randrange(3), *x.shape[axis:])
            case "step" if x.ndim and x.shape[axis]:
                x = x.narrow(axis, 1, x.shape[axis] - 1)
                x = x[(slice(None),) * axis + (slice(None, None, 2),)]
            case "unsqueeze":
                x = x.unsqueeze(axis)
            case "negate":
                x = torch._neg_view(x)
            case "fold" if x.ndim and x.shape[-1] > 2:
                x = x.unfold(-1, 2, 1)
            case "zeros":
                x = torch._efficientzerotensor(x.shape, dtype=x.dtype)
            case "select" if x.ndim and x.shape[axis]:
                x = x.select(axis, x.shape[axis] - 1)
    return x


def dressed(case: random.Random, x: Tensor) -> Tensor:
    """The same values as another kind of tensor."""
    match case.randrange(4):
        case 0:
            return torch.nn.Parameter(x, requires_grad=False)
        case 1:
            return x.as_subclass(Subclass)
        case 2 if x.dtype == torch.float32:
            return torch.view_as_complex(torch.stack([x, -x], dim=-1)).conj().imag
    return x


def test_any_view_is_taken_for_its_values(cases: Cases) -> None:
    for case in cases:
        for _ in range(4):
            x = any_view(
                case, dressed(case, any_values(case, any_shape(case), case.choice(DTYPES)))
            )
            if x.numel() > 1 << 16:
                continue
            call = any_call(case, x.ndim)
            plain = torch.empty(x.shape, dtype=x.dtype).copy_(x.clone())
            assert_same_result(call(x), call(plain), (call, x.shape, x.stride()))


def test_an_out_that_overlaps_is_filled_as_a_new_one(cases: Cases) -> None:
    for case in cases:
        dtype, size = case.choice(DTYPES), case.choice((64, 4096))
        memory = any_values(case, (2 * size,), dtype)
        x, out = (
            memory[start : start + size] for start in (case.randrange(size), case.randrange(size))
        )
        call = any_call(case, 1, "quantise")
        expected = call(x.clone())
        quantise(x, call.spec, axis=call.axis, seed=call.seed, out=out)
        assert_same_result(out, expected, call)


def states() -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """Ambient states of torch, entered around a call."""
    return {
        "float64 by default": lambda: _default_dtype(torch.float64),
        "bfloat16 by default": lambda: _default_dtype(torch.bfloat16),
        "meta by default": lambda: torch.device("meta"),
        "deterministic": lambda: _deterministic(),
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "inference": torch.inference_mode,
        "three threads": lambda: _threads(3),
        "one thread": lambda: _threads(1),
        "watched": _Watch,
        "flushing": lambda: _flushing(),
        "no gradient": torch.no_grad,
    }


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Uninitialised memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
        assert (_smallest(2).mul_(0.5) == 0).all(), "the setting is restored"
    finally:
        torch.set_flush_denormal(False)


def _smallest(num_elements: int) -> Tensor:
    return torch.full((num_elements,), 2.0**-126, dtype=torch.float32, device="cpu")


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_no_state_of_torch_changes_a_bit(cases: Cases) -> None:
    for case in cases:
        for _ in range(3):
            x = any_values(case, any_shape(case), case.choice(DTYPES))
            call = any_call(case, x.ndim)
            expected = call(x)
            names = case.sample(sorted(states()), case.randrange(1, 4))
            with ExitStack() as stack:
                for name in names:
                    stack.enter_context(states()[name]())
                result = call(x)
            assert_same_result(result, expected, (call, x.shape, names))


def test_threads_that_flush_change_no_bit(cases: Cases) -> None:
    """Threads of torch's pool that started while the caller flushed do so for ever."""
    with _threads(2):
        with _threads(4), _flushing():
            torch.zeros(1 << 20).add_(1)
        stuck = _smallest(1 << 20).mul_(0.5)
        for case in islice(cases, None):
            x = any_values(
                case, (case.choice((1, 3)), case.choice((40_000, 32_768)) * 2), case.choice(DTYPES)
            )
            call = any_call(case, 2, *(name for name in CALLS if name != "hadamard"))
            with _threads(1):
                expected = call(x)
            assert_same_result(call(x), expected, (call, x.shape, int((stuck == 0).sum())))


@pytest.mark.parametrize("name", MX_ELEMENTS)
def test_the_smallest_numbers_are_exact_where_torch_flushes(name: str, cases: Cases) -> None:
    """The oracle is exact: a number that is a sum of few powers of two stays itself, in a block of its size."""
    element = FORMATS[name].element
    for case in cases:
        exponent = case.randrange(-126 + element.emin - element.mantissa_bits + 8, -110)
        x = torch.full((32,), 2.0**exponent) * case.choice((1.0, 1.5, -1.0))
        with _flushing():
            assert_same_result(quantise(x, name), x, (name, exponent))
