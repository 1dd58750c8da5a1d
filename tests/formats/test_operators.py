"""The operations as custom operators of torch, and their text of a specification."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.formats import (
    FORMATS,
    Place,
    ScaleRule,
    decode,
    encode,
    finite_amax,
    get_format,
    hadamard,
    lies_on_grid,
    quantise,
    quantise_both,
    resolve,
    saturated,
    scales_of,
)
from quantexp.formats.operators import signed, spec_of, text_of, unsigned

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
SPEC = resolve("hifp8", scaling="current", amax_target=7.5)
CODES, SCALES = encode(X, "nvfp4", packed=True)


def rest_is_slow(names: Iterable[str], *quick: str) -> list[Any]:
    """The names as parameters; all but a few are slow, because torch compiles for each."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


#: An operator of the dispatcher with arguments, for torch's own checks.
SAMPLES: dict[str, tuple[Any, ...]] = {
    "quantise": (X, "mxfp8_e4m3 scale_rule=rceil", 1, None, None, None, None, None),
    "encode": (X, "nvfp4_e2m1", 0, None, None, None, True),
    "decode": (CODES, "nvfp4_e2m1", 1, list(SCALES), True, 64, torch.bfloat16),
    "finite_amax": (X,),
    "scales_of": (X, "hifp8 scaling=current", 0, torch.ones(())),
    "saturated": (X, "mxfp4_e2m1", 1, None),
    "lies_on_grid": (X, "fp8_e5m2", 0, None),
    "hadamard": (X, 1, 32, None, True, False),
}


@pytest.mark.parametrize("name", rest_is_slow(SAMPLES, "quantise"))
def test_torch_checks_each_operator(name: str) -> None:
    """Schema, aliases, fake results, and compilation with fixed and with dynamic shapes."""
    operator = getattr(torch.ops.quantexp, name).default
    assert set(torch.library.opcheck(operator, SAMPLES[name]).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", FORMATS)
def test_the_text_of_a_specification_is_read_back(name: str) -> None:
    values: dict[str, Any] = {
        "block": 64,
        "scale_rule": ScaleRule.RCEIL,
        "rounding": "stochastic",
        "saturate": False,
        "scaling": "current",
        "amax_target": 0.1,
        "pre_scale": 16 / 17,
    }
    options = {key: value for key, value in values.items() if key in FORMATS[name].options}
    spec = resolve(name, **options)
    text = text_of(spec)
    assert spec_of(text) == spec
    assert text.startswith(name)


def test_seeds_wrap_to_signed_integers_and_back() -> None:
    for number in (None, 0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        wrapped = signed("seed", number)
        assert wrapped is None or -(2**63) <= wrapped < 2**63
        assert unsigned(wrapped) == number
    with pytest.raises(ValueError, match=r"seed must be an integer in \[0, 2\^64\), got -1"):
        signed("seed", -1)


def test_a_format_of_ones_own_is_not_compiled() -> None:
    own = replace(get_format("mxfp8"), name="own")
    assert torch.equal(quantise(X, own), quantise(X, "mxfp8"))
    with pytest.raises(ValueError, match=r"the format 'own' is not in quantexp\.formats\.FORMATS"):
        torch.func.functionalize(lambda v: quantise(v, own))(X)


def round_trip(x: Tensor) -> Tensor:
    codes, scales = encode(x, "nvfp4", packed=True)
    return decode(codes, scales, "nvfp4", packed=True)


def test_a_function_without_random_numbers_needs_no_seed() -> None:
    spec = resolve("mxfp4", rounding="stochastic")
    codes, scales = encode(X, spec, seed=1)

    def all_three(x: Tensor, codes: Tensor) -> tuple[Any, ...]:
        return decode(codes, scales, spec), scales_of(x, spec), saturated(x, spec)

    for a, b in zip(
        torch.func.functionalize(all_three)(X, codes), all_three(X, codes), strict=True
    ):
        assert torch.equal(a, b)


class Quantiser(torch.nn.Module):
    """A module as users write it: its specification is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = SPEC

    def forward(self, x: Tensor) -> Tensor:
        return quantise(x, self.spec)


COMPILED: dict[str, Callable[[Tensor], Any]] = {
    "options": lambda x: quantise(x, "mxfp4", scale_rule=ScaleRule.RCEIL, block=16),
    "module": Quantiser(),
    "codes": round_trip,
    "both": lambda x: quantise_both(x, "mxfp8", axes=(0, 1)),
    "scales": lambda x: scales_of(x, SPEC),
    "masks": lambda x: (saturated(x, "mxfp4"), lies_on_grid(x, "mxfp4")),
    "amax": lambda x: quantise(hadamard(x), SPEC, amax=finite_amax(x)),
    "random": lambda x: quantise(
        x,
        "mxfp4",
        rounding="stochastic",
        seed=2**64 - 5,
        place=Place((8, 128), (1, 2)),
    ),
    "out": lambda x: quantise(x, "mxfp8", out=torch.empty_like(x)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", rest_is_slow(COMPILED, "module", "codes"))
def test_torch_compile_takes_every_function_as_one_graph(name: str, dynamic: bool) -> None:
    function = COMPILED[name]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for x in (X, X[:3], X.bfloat16()):
        ours, theirs = (torch.utils._pytree.tree_leaves(f(x)) for f in (compiled, function))
        assert [(a.stride(), a.dtype) for a in ours] == [(b.stride(), b.dtype) for b in theirs]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("of_function", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_model_is_differentiated_straight_through(of_function: bool) -> None:
    def loss(x: Tensor) -> Tensor:
        return (quantise(x, "mxfp8", straight_through=True) * (2 * X[:, :33])).sum()

    torch.compiler.reset()
    x = X[:, :33].clone()
    if of_function:
        gradient = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(gradient, 2 * X[:, :33])
        tangent = torch.compile(
            lambda v: torch.func.jvp(loss, (v,), (torch.ones_like(v),))[1],
            fullgraph=True,
            backend="aot_eager",
        )(x)
        torch.testing.assert_close(tangent, (2 * X[:, :33]).sum())
    else:
        leaf = x.requires_grad_()
        torch.compile(loss, fullgraph=True, backend="aot_eager")(leaf).backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, 2 * X[:, :33])


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_drops_no_gradient_either() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: quantise(x, "mxfp8"), backend="aot_eager")
    with pytest.raises(RuntimeError, match="requires a gradient, and rounding has none"):
        compiled(X.clone().requires_grad_())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_default_compiler_keeps_every_bit() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: quantise(x + 1, "mxfp8") * 2, fullgraph=True)
    assert torch.equal(compiled(X), quantise(X + 1, "mxfp8") * 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
def test_a_model_is_exported_with_dynamic_shapes(strict: bool) -> None:
    batch = {0: torch.export.Dim("batch", min=2)}
    program = torch.export.export(Quantiser(), (X,), dynamic_shapes={"x": batch}, strict=strict)
    assert "quantexp.quantise" in str(program.graph)
    for x in (X, X[:3]):
        assert torch.equal(program.module()(x), quantise(x, SPEC))


@pytest.mark.filterwarnings("ignore")
def test_a_trace_calls_the_operator_again() -> None:
    traced = torch.jit.trace(lambda x: quantise(x, "mxfp8"), torch.zeros(4, 64))
    assert torch.equal(traced(X), quantise(X, "mxfp8"))


def test_every_example_of_a_batch_has_its_own_scale() -> None:
    x = X * torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    for amax in (None, torch.tensor([1.0, 2.0, 3.0, 4.0])):
        mapped = torch.func.vmap(lambda v, a: quantise(v, SPEC, amax=a))(
            x, finite_amax_of_rows(x) if amax is None else amax
        )
        rows = [
            quantise(v, SPEC, amax=None if amax is None else amax[index])
            for index, v in enumerate(x)
        ]
        assert torch.equal(mapped, torch.stack(rows))


def finite_amax_of_rows(x: Tensor) -> Tensor:
    return torch.func.vmap(finite_amax)(x)


def test_functionalize_refuses_to_drop_a_derivative() -> None:
    def loss(x: Tensor) -> Tensor:
        return quantise(x, "mxfp8", straight_through=True).sum()

    with pytest.raises(RuntimeError, match=r"functionalize drops a straight-through derivative"):
        torch.func.grad(torch.func.functionalize(loss))(X)
    inside = torch.func.functionalize(torch.func.grad(loss))(X)
    assert torch.equal(inside, torch.ones_like(X))


def test_an_empty_batch_has_results_without_examples() -> None:
    codes, scales = torch.func.vmap(lambda v: encode(v, "mxfp4", packed=True))(X[:0])
    assert (codes.shape, scales.shape) == ((0, 32), (0, 2))
    assert torch.func.vmap(lambda v: quantise(v, SPEC))(X[:0]).shape == (0, 64)
