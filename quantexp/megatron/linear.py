"""Megatron's parallel linear layers with the scheme's three matrix products in place of the stock ones.

One method is overridden, `_forward_impl`, the one that multiplies; parameters, initialisation, gathering and
checkpointing stay Megatron's. The autograd function keeps the input and weight as they came, as the stock function
does, and returns the weight gradient in the working dtype: it enters the fp32 main gradient through
DistributedDataParallel's hook, by the same route in every scheme, bf16 included. Tensor parallelism is refused
here.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from quantexp.errors import ConfigError
from quantexp.quant.linear import dgrad, fprop, wgrad
from quantexp.quant.operand import clipped
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.rows import Rows
from quantexp.quant.sites import Product, Site
from quantexp.quant.tap import BACKWARD, FORWARD, POST, PRE, Tap, nobody


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, precision: ModulePrecision, tap: Tap, rows: Rows | None
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.precision, ctx.tap, ctx.rows = precision, tap, rows
        return fprop(precision, x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        x, w = ctx.saved_tensors
        precision: ModulePrecision = ctx.precision
        tap = ctx.tap if g.numel() else nobody
        tap(BACKWARD, PRE, "grad_output", g)
        ctx.tap(BACKWARD, PRE, "weight", w)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = dgrad(precision, g, w)
            dx = clipped(dx, x, precision.operand(Site.LINEAR, Product.FPROP, "x"), -1)
            tap(BACKWARD, POST, "grad_input", dx)
        if ctx.needs_input_grad[1]:
            dw = wgrad(precision, g, x, ctx.rows)
            dw = clipped(dw, w, precision.operand(Site.LINEAR, Product.FPROP, "w"), -1)
            tap(BACKWARD, POST, "grad_weight", dw)
        return dx, dw, None, None, None


class SchemeLinear:
    """What both parallel linear layers share; `precision` is set once the model is built."""

    precision: ModulePrecision
    tap: Tap = staticmethod(nobody)
    #: A routed expert's tokens of this micro-batch; None where they are of one sequence, or all of the micro-batch.
    rows: Rows | None = None

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
                "this layer runs without gradient-accumulation fusion, tensor and sequence parallelism; got "
                f"fusion={gradient_accumulation_fusion}, tensor parallel={allreduce_dgrad}, "
                f"sequence parallel={sequence_parallel}"
            )
        tap = (
            self.tap if input.numel() else nobody
        )  # an expert without tokens shows its weight alone
        tap(FORWARD, PRE, "input", input)
        self.tap(FORWARD, PRE, "weight", weight)
        output: Tensor = _Linear.apply(input, weight, self.precision, self.tap, self.rows)  # type: ignore[no-untyped-call]
        tap(FORWARD, POST, "output", output)
        return output if bias is None else output + bias


class SchemeColumnParallelLinear(SchemeLinear, ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's ColumnParallelLinear (qkv, fc1), multiplying as the scheme declares."""


class SchemeRowParallelLinear(SchemeLinear, RowParallelLinear):  # type: ignore[misc]
    """Megatron's RowParallelLinear (proj, fc2), multiplying as the scheme declares."""
