"""Megatron's parallel linear layers with the scheme's three matrix products instead of the stock ones.

Only `_forward_impl`, which multiplies, is overridden; parameters, initialisation, gathering and checkpointing are
Megatron's. The autograd function saves the weight and, like the stock function, the input, or instead the copy of it
that wgrad multiplies (`quantexp.quant.linear`). It returns the weight gradient in the working dtype, which
DistributedDataParallel's hook adds to the fp32 main gradient in every scheme, bf16 included. Tensor parallelism is not
supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from quantexp.errors import ConfigError
from quantexp.quant.hooks import BACKWARD, FORWARD, POST, PRE, TensorHook, no_hook
from quantexp.quant.linear import (
    backward_needs_input,
    dgrad,
    fprop,
    gradient_copies,
    input_copies,
    wgrad,
)
from quantexp.quant.multiply import clipped
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.rows import Rows
from quantexp.quant.sites import FPROP_W, FPROP_X
from quantexp.quant.weight_cache.weights import WeightCopies


@dataclass(frozen=True)
class _Call:
    """The arguments of one forward pass besides its tensors."""

    precision: ModulePrecision
    hook: TensorHook
    rows: Rows | None
    copies: WeightCopies
    #: Whether a backward may follow: False in an evaluation and in a forward that will be recomputed.
    differentiated: bool


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, call: _Call) -> Tensor:
        ctx.call, precision = call, call.precision
        needs_dx, needs_dw = (call.differentiated and needs for needs in ctx.needs_input_grad[:2])
        x_fprop: Tensor | None = None
        x_wgrad: Tensor | None = None
        if needs_dw:
            x_fprop, x_wgrad = input_copies(precision, x, call.rows, call.copies.buffers)
        w_fprop = call.copies.for_fprop(precision, w, needs_dx)
        keeps_x = x_wgrad is None or backward_needs_input(precision)
        ctx.save_for_backward(x if keeps_x else None, x_wgrad, w)
        return fprop(precision, x, w, quantised_x=x_fprop, quantised_w=w_fprop)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        x, x_wgrad, w = ctx.saved_tensors
        x = x_wgrad if x is None else x  # then only wgrad's copy is needed
        call: _Call = ctx.call
        precision = call.precision
        hook = call.hook if g.numel() else no_hook
        hook(BACKWARD, PRE, "grad_output", g)
        call.hook(BACKWARD, PRE, "weight", w)
        dx = dw = g_dgrad = g_wgrad = None
        if ctx.needs_input_grad[0] and ctx.needs_input_grad[1]:
            g_dgrad, g_wgrad = gradient_copies(precision, g, call.rows, call.copies.buffers)
        if ctx.needs_input_grad[0]:
            w_dgrad = call.copies.for_dgrad(precision, w)
            dx = dgrad(precision, g, w, quantised_g=g_dgrad, quantised_w=w_dgrad)
            del g_dgrad, w_dgrad
            dx = clipped(dx, x, precision.spec(FPROP_X), -1)
            hook(BACKWARD, POST, "grad_input", dx)
        if ctx.needs_input_grad[1]:
            dw = wgrad(precision, g, x, call.rows, quantised_g=g_wgrad, quantised_x=x_wgrad)
            dw = clipped(dw, w, precision.spec(FPROP_W), -1)
            hook(BACKWARD, POST, "grad_weight", dw)
        return dx, dw, None


class SchemeLinear:
    """The common part of both parallel linear layers; `set_precision` sets `precision` after the model is built."""

    precision: ModulePrecision
    hook: TensorHook = staticmethod(no_hook)
    #: A routed expert's tokens of this micro-batch; None if they are of one sequence or are the whole micro-batch.
    rows: Rows | None = None
    #: Replaced by `share_weight_copies`; this default stores nothing.
    copies: WeightCopies = WeightCopies()

    def _forward_impl(
        self,
        input: Tensor,  # noqa: A002  (Megatron calls with this keyword)
        weight: Tensor,
        bias: Tensor | None = None,
        gradient_accumulation_fusion: bool = False,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        **deferral: object,
    ) -> Tensor:
        if gradient_accumulation_fusion or allreduce_dgrad or sequence_parallel:
            raise ConfigError(
                "linear layers do not support gradient-accumulation fusion, tensor or sequence parallelism here; got "
                f"fusion={gradient_accumulation_fusion}, tensor parallel={allreduce_dgrad}, "
                f"sequence parallel={sequence_parallel}"
            )
        # Of an expert without tokens only the weight is captured.
        hook = self.hook if input.numel() else no_hook
        hook(FORWARD, PRE, "input", input)
        self.hook(FORWARD, PRE, "weight", weight)
        call = _Call(self.precision, self.hook, self.rows, self.copies, torch.is_grad_enabled())
        output: Tensor = _Linear.apply(input, weight, call)  # type: ignore[no-untyped-call]
        hook(FORWARD, POST, "output", output)
        return output if bias is None else output + bias


class SchemeColumnParallelLinear(SchemeLinear, ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's ColumnParallelLinear (qkv, fc1) with the scheme's products."""


class SchemeRowParallelLinear(SchemeLinear, RowParallelLinear):  # type: ignore[misc]
    """Megatron's RowParallelLinear (proj, fc2) with the scheme's products."""
