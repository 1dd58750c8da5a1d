"""Operands shared by two products of one tensor, against each computed separately."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.quant.hooks import hook_operands
from quantexp.quant.linear import backward_needs_input, gradient_copies, input_copies, wgrad
from quantexp.quant.multiply import quantise_operand
from quantexp.quant.precision import ModuleId, ModulePrecision, precision_map
from quantexp.quant.rows import Rows
from quantexp.quant.sites import DGRAD_G, FPROP_X, WGRAD_G, WGRAD_X
from quantexp.quant.step_state import StepState, use_step_state
from quantexp.quant.weight_cache.buffers import Buffers
from quantexp.schema import LinearSite, LinearWgrad, ModelConfig, QuantConfig, Slot
from quantexp.training.megatron.linear import SchemeLinear

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=64,
    ffn_hidden_size=48,
    num_attention_heads=1,
    num_query_groups=1,
    head_dim=64,
)


def declared(fmt: str, x: Slot | None = None, **options: Any) -> ModulePrecision:
    site = LinearSite(format=fmt, wgrad=LinearWgrad(x=x or Slot()), **options)
    return precision_map(MODEL, QuantConfig(linear=site))[ModuleId(0, "fc1")]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "hifp8", "nvfp4", "fp8_e4m3", "mxfp6_e2m3"])
@pytest.mark.parametrize("shape", [(80, 2, 64), (80, 1, 64), (33, 64), (0, 64)])
def test_copies_of_one_read_are_those_of_two(fmt: str, shape: tuple[int, ...]) -> None:
    precision, x = declared(fmt), normal(*shape)
    for copies, first, second in (
        (input_copies, FPROP_X, WGRAD_X),
        (gradient_copies, DGRAD_G, WGRAD_G),
    ):
        one, two = copies(precision, x, None, Buffers())
        assert two is not None
        assert torch.equal(one, quantise_operand(x, precision.spec(first), -1))
        assert torch.equal(two, quantise_operand(x, precision.spec(second), 0))


@pytest.mark.parametrize("fmt", ["mxfp8", "hifp8"])
def test_copies_in_reused_memory_are_the_same(fmt: str) -> None:
    """Tensors that the backward pass keeps or a hook receives are not overwritten."""
    precision, buffers = declared(fmt), Buffers()
    buffers.begin_step()
    wide, x = normal(80, 2, 96), normal(80, 2, 64)
    for copies in (input_copies, gradient_copies):
        fresh = copies(precision, x, None, Buffers())
        copies(precision, wide, None, buffers)
        first, second = copies(precision, x, None, buffers)
        assert torch.equal(first, fresh[0])
        assert second is not None
        assert fresh[1] is not None
        assert torch.equal(second, fresh[1])
        third, fourth = copies(precision, -x, None, buffers)
        assert fourth is not None
        overwritten = first.data_ptr() == third.data_ptr(), second.data_ptr() == fourth.data_ptr()
        if copies is gradient_copies:
            assert overwritten == (True, True)
        else:
            assert overwritten == (fmt == "mxfp8", False)
        with hook_operands(lambda *_: None):
            hooked, _ = copies(precision, x, None, buffers)
        assert hooked.data_ptr() != third.data_ptr()


def test_an_operand_that_differs_by_more_than_its_axis_is_quantised_separately() -> None:
    x = normal(64, 1, 64)
    for other in (Slot(format="mxfp4"), Slot(scale_rule="floor"), Slot(block=16)):
        assert input_copies(declared("mxfp8", other), x, None, Buffers())[1] is None
    assert input_copies(declared("mxfp8", Slot(format="bf16")), x, None, Buffers())[1] is x
    forward, again = input_copies(declared("mxfp8", Slot(format="reuse")), x, None, Buffers())
    assert again is forward
    drawn: list[dict[str, Any]] = [{"rounding": "stochastic"}, {"hadamard": "deterministic"}]
    for options in drawn:
        with use_step_state(StepState(1)):
            assert input_copies(declared("mxfp4", **options), x, None, Buffers())[1] is None


def test_blocks_of_an_experts_rows_are_formed_by_sequence() -> None:
    x, rows = normal(40, 64), Rows(torch.arange(40) % 2, 2)
    assert input_copies(declared("mxfp8"), x, rows, Buffers())[1] is None
    assert gradient_copies(declared("mxfp8"), x, rows, Buffers())[1] is None
    for precision in (declared("hifp8"), declared("mxfp8", Slot(format="reuse"))):
        forward, again = input_copies(precision, x, rows, Buffers())
        assert again is forward
    g = normal(40, 96)
    precision = declared("mxfp8", Slot(format="reuse"))
    _, quantised_x = input_copies(precision, x, rows, Buffers())
    assert torch.equal(
        wgrad(precision, g, x, rows, quantised_x=quantised_x), wgrad(precision, g, x, rows)
    ), "laid out by sequence, before or after"


def test_the_backward_needs_the_input_only_where_it_is_used() -> None:
    assert not backward_needs_input(declared("mxfp8"))
    assert not backward_needs_input(declared("hifp8"))
    assert backward_needs_input(declared("mxfp8", scale_rule="floor", clip_gradient=True))
    assert backward_needs_input(declared("nvfp4", pre_scale=True))
    assert backward_needs_input(declared("hifp8", Slot(format="reuse"), scaling="delayed"))
    with hook_operands(lambda *_: None):
        assert backward_needs_input(declared("mxfp8"))


@pytest.mark.parametrize(
    ("precision", "num_saved"),
    [
        (declared("bf16"), 1),
        (declared("mxfp8"), 1),
        (declared("hifp8"), 1),
        (declared("mxfp8", Slot(format="mxfp4")), 1),
        (declared("mxfp8", scale_rule="floor", clip_gradient=True), 2),
    ],
    ids=["bf16", "blocks", "no blocks", "two formats", "clipped"],
)
def test_the_backward_saves_one_tensor_of_the_inputs_size(
    precision: ModulePrecision, num_saved: int
) -> None:
    class Layer(SchemeLinear):
        pass

    layer = Layer()
    layer.precision = precision
    x, w = normal(64, 1, 64).requires_grad_(), normal(96, 64).requires_grad_()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer._forward_impl(x, w)
    inputs = {tensor.data_ptr() for tensor in saved if tensor.shape == x.shape}
    assert len(inputs) == num_saved
    y.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
