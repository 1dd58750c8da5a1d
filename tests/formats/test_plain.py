"""Which tensors are plain memory, and which are refused. The attacks in tests/hostile try many more kinds."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from quantexp.formats import quantise
from quantexp.formats.torch_internals import check_input, constant, is_plain, needs_derivative

X = torch.ones(2, 32)


def test_ordinary_tensors_are_plain() -> None:
    with torch.inference_mode():
        inference = torch.ones(2)
    for x in (X, X.t(), torch.nn.Parameter(X), X.bfloat16(), inference, X[:0]):
        assert is_plain(x)
    assert is_plain(X, None, X)


def test_tensors_whose_values_are_not_in_memory_are_not_plain() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    others = [fake, torch._neg_view(X), torch._efficientzerotensor((2,)), X.to("meta")]
    assert not any(is_plain(x) for x in others)
    assert not is_plain(X, fake)
    answers = []
    torch.func.vmap(lambda v: (answers.append(is_plain(v)), v)[1])(X)
    torch.func.grad(lambda v: (answers.append(is_plain(v)), v.sum())[1])(X)
    make_fx(lambda v: (answers.append(is_plain(v)), v)[1])(X)
    make_fx(lambda v: (answers.append(is_plain(v)), v)[1], pre_dispatch=True)(X)
    assert answers == [False] * 4


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([1.0], "x must be a torch.Tensor, got a list: convert it with torch.as_tensor"),
        (X.to_sparse(), r"x must be a dense tensor, got a sparse one: pass x\.to_dense\(\)"),
        (X.to("meta"), "x must be a dense tensor, got a meta one: x has no values, so load them"),
        (X.to(torch.complex64), r"complex64: must be one of .*; quantise torch\.view_as_real\(x\)"),
        (X.long(), r"int64: must be one of .*; convert it with x\.float\(\)"),
    ],
)
def test_inputs_that_cannot_be_quantised_are_refused_with_a_remedy(x: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        check_input(x)


def test_a_distributed_tensor_is_refused_with_a_remedy() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(X, mesh, [Shard(0)])
        words = r"x must be a dense tensor, got a distributed one: pass x\.full_tensor\(\), or x\.to_local"
        with pytest.raises(TypeError, match=words):
            quantise(x, "mxfp8")
        assert torch.equal(quantise(x.to_local(), "mxfp8"), quantise(X, "mxfp8"))
    finally:
        torch.distributed.destroy_process_group()


def test_an_amax_is_a_real_constant() -> None:
    options = {"scaling": "current"}
    for amax, kind, words in (
        (1.0, TypeError, "amax must be a torch.Tensor, got a float"),
        (torch.ones((), dtype=torch.complex64), TypeError, r"amax must be real.*amax\.abs\(\)"),
        (torch.ones(1), ValueError, r"amax must be a 0-dim tensor, got shape \(1,\)"),
    ):
        with pytest.raises(kind, match=words):
            quantise(X, "hifp8", amax=amax, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", [None, 1.5, "0"])
def test_an_axis_is_an_integer(axis: object) -> None:
    with pytest.raises(TypeError, match=f"axis must be an integer, got {axis!r}"):
        quantise(X, "mxfp8", axis=axis)  # type: ignore[arg-type]


def test_a_derivative_is_needed_at_any_level() -> None:
    assert not needs_derivative(X)
    leaf = X.clone().requires_grad_()
    assert needs_derivative(leaf)
    with torch.no_grad():
        assert not needs_derivative(leaf)
    assert not constant(leaf).requires_grad
    answers = []

    def inner(v: torch.Tensor) -> torch.Tensor:
        answers.append(needs_derivative(v))
        return v.sum()

    torch.func.grad(lambda v: torch.func.vmap(inner)(v).sum())(X)
    torch.func.jvp(lambda v: torch.func.vmap(inner)(v), (X,), (X,))
    assert answers == [True, True]
    torch.func.vmap(inner)(X)
    assert answers[-1] is False
