"""Transforms of torch.func, tracers, threads of Python and forks see the same numbers of quantexp.formats."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from quantexp.formats import quantise

from .format_calls import (
    DTYPES,
    Call,
    any_call,
    any_values,
    assert_same_result,
)
from .test_formats import Cases, _threads


#: Transforms: a call and a tensor, to the results to compare.
def _mapped(call: Call, x: Tensor, case: random.Random) -> tuple[Any, Any]:
    dim = case.randrange(x.ndim)
    one_by_one = [call(part) for part in x.unbind(dim)]
    if not one_by_one:
        return (), ()
    stacked = torch.utils._pytree.tree_map(lambda *parts: torch.stack(parts), *one_by_one)
    return torch.func.vmap(call, in_dims=dim)(x), stacked


def _traced(call: Call, x: Tensor, case: random.Random) -> tuple[Any, Any]:
    modes: tuple[Literal["real", "fake", "symbolic"], ...] = ("real", "fake", "symbolic")
    graph = make_fx(call, tracing_mode=case.choice(modes))(torch.zeros_like(x))
    return graph(x), call(x)


def _functional(call: Call, x: Tensor, case: random.Random) -> tuple[Any, Any]:
    return torch.func.functionalize(call)(x), call(x)


def _fake(call: Call, x: Tensor, case: random.Random) -> tuple[Any, Any]:
    """Fake results have the shapes, strides and dtypes of the real ones."""
    with FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_leaves(call(mode.from_tensor(x)))
    reals = torch.utils._pytree.tree_leaves(call(x))
    for fake, real in zip(fakes, reals, strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype), call
    return (), ()


def test_transforms_and_tracers_see_the_same_numbers(cases: Cases) -> None:
    for case in cases:
        transform = case.choice((_mapped, _traced, _functional, _fake))
        x = any_values(case, (case.randrange(5), case.choice((1, 16, 33, 64))), case.choice(DTYPES))
        call = any_call(case, 1 if transform is _mapped else 2)
        actual, expected = transform(call, x, case)
        assert_same_result(actual, expected, (transform, call, x.shape))


def test_a_derivative_is_the_identity_or_an_error(cases: Cases) -> None:
    for case in cases:
        x = any_values(case, (3, case.choice((16, 33))), case.choice(DTYPES))
        weight = torch.randn(x.shape).to(x.dtype)
        spec = any_call(case, 2, "quantise").spec
        seed = 1 if spec.rounding == "stochastic" else None

        def through(v: Tensor, *, spec: Any = spec, seed: int | None = seed) -> Tensor:
            return quantise(v, spec, seed=seed, straight_through=True)

        def dropping(v: Tensor, *, spec: Any = spec, seed: int | None = seed) -> Tensor:
            return quantise(v, spec, seed=seed)

        transform = case.choice(
            (_backward, _gradient, _tangent, _gradients_of_examples, _tangents_of_examples)
        )
        y, derivative = transform(through, x, weight)
        assert_same_result(derivative, weight, (transform, spec))
        if transform not in (_gradients_of_examples, _tangents_of_examples):
            assert_same_result(y, dropping(x), (transform, spec))
        with pytest.raises(RuntimeError, match="requires a gradient, and rounding has none"):
            transform(dropping, x, weight)


Function = Callable[[Tensor], Tensor]


def _backward(f: Function, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = f(leaf)
    y.backward(weight)
    assert leaf.grad is not None
    return y, leaf.grad


def _gradient(f: Function, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y, pull, *_ = torch.func.vjp(f, x)
    return y, pull(weight)[0]


def _tangent(f: Function, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y, tangent, *_ = torch.func.jvp(f, (x,), (weight,))
    return y, tangent


def _gradients_of_examples(f: Function, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y, pull, *_ = torch.func.vjp(torch.func.vmap(f), x)
    return y, pull(weight)[0]


def _tangents_of_examples(f: Function, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y, tangent, *_ = torch.func.jvp(torch.func.vmap(f), (x,), (weight,))
    return y, tangent


def test_many_threads_of_python_get_the_same_numbers(cases: Cases) -> None:
    inputs = []
    for case in islice(cases, 60):
        x = any_values(case, (4, case.choice((64, 20_000))), case.choice(DTYPES))
        call = any_call(case, 2)
        inputs.append((call, x, call(x)))
    wrong: list[object] = []

    def run(start: int) -> None:
        if start % 2:
            torch.set_flush_denormal(True)  # of this thread
        for call, x, expected in inputs[start:] + inputs[:start]:
            try:
                assert_same_result(call(x), expected, call)
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                wrong.append((call, error))

    threads = [threading.Thread(target=run, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_process_does_not_wait_for_threads_that_it_lacks(cases: Cases) -> None:
    with _threads(2):
        torch.zeros(1 << 20).add_(1)  # starts the pool
        for case in islice(cases, 8):
            x = any_values(case, (2, 40_000), case.choice(DTYPES))
            call = any_call(case, 2)
            expected = call(x)
            check = partial(_check_call, call, x, expected)
            assert _exit_status_of_fork(check) == 0, (call, x.shape)


def _check_call(call: Call, x: Tensor, expected: object) -> None:
    assert_same_result(call(x), expected, call)


def _exit_status_of_fork(run: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + 240
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1
