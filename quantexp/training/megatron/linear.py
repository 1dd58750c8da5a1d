"""Megatron's parallel linear layers with the scheme's three matrix products instead of the stock ones.

Only `_forward_impl`, which multiplies, is overridden; parameters, initialisation, gathering and checkpointing are
Megatron's. The autograd function saves the weight and, like the stock function, the input, or instead the copy of it
that wgrad multiplies (`quantexp.quant.linear`). It returns the weight gradient in the working dtype, which
DistributedDataParallel's hook adds to the fp32 main gradient in every scheme, bf16 included.

With tensor parallelism (arXiv 1909.08053) a column layer's input gradient is reduced while wgrad runs. With sequence
parallelism (arXiv 2205.05198) the function saves a rank's own tokens and gathers them again in the backward pass, as
the stock layer does; the quantiser always sees the gathered tensor.

A bias (Qwen2's qkv) is never quantised. It is added after the product, which goes to the hook without it.
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
    clipped_input,
    dgrad,
    fprop,
    gradient_copies,
    input_copies,
    wgrad,
)
from quantexp.quant.multiply import clipped_gradient, turned_back
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.rows import Rows
from quantexp.quant.sites import DGRAD_W, FPROP_W, FPROP_X, WGRAD_X
from quantexp.quant.weight_cache.weights import WeightCopies
from quantexp.training.megatron.token_exchange import NO_EXCHANGE, Exchange, Pending


@dataclass(frozen=True)
class _Call:
    """The arguments of one forward pass besides its tensors."""

    precision: ModulePrecision
    hook: TensorHook
    rows: Rows | None
    copies: WeightCopies
    #: Whether a backward may follow: False in an evaluation and in a forward that will be recomputed.
    differentiated: bool
    exchange: Exchange


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_x: Tensor, w: Tensor, call: _Call) -> Tensor:
        ctx.call, precision, exchange = call, call.precision, call.exchange
        x = exchange.start_gather(own_x).wait()
        # Of an expert without tokens only the weight is captured.
        hook = call.hook if x.numel() else no_hook
        hook(FORWARD, PRE, "input", x)
        call.hook(FORWARD, PRE, "weight", w)
        needs_dx, needs_dw = (call.differentiated and needs for needs in ctx.needs_input_grad[:2])
        x_fprop: Tensor | None = None
        x_wgrad: Tensor | None = None
        if needs_dw and not exchange.divides_tokens:
            x_fprop, x_wgrad = input_copies(precision, x, call.rows, call.copies.buffers)
        w_fprop = call.copies.for_fprop(precision, w, needs_dx)
        keeps_x = x_wgrad is None or backward_needs_input(precision)
        ctx.save_for_backward(own_x if keeps_x else None, x_wgrad, w)
        return fprop(precision, x, w, call.rows, quantised_x=x_fprop, quantised_w=w_fprop)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        own_x, x_wgrad, w = ctx.saved_tensors
        own_x = x_wgrad if own_x is None else own_x  # then only wgrad's copy is needed
        call: _Call = ctx.call
        precision, exchange = call.precision, call.exchange
        hook = call.hook if g.numel() else no_hook
        hook(BACKWARD, PRE, "grad_output", g)
        call.hook(BACKWARD, PRE, "weight", w)
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        x = exchange.start_gather(own_x)
        dw = g_dgrad = g_wgrad = None
        if needs_dx and needs_dw:
            g_dgrad, g_wgrad = gradient_copies(precision, g, call.rows, call.copies.buffers)
        dx: Pending | None = None
        if needs_dx:
            w_dgrad = call.copies.for_dgrad(precision, w)
            partial = dgrad(precision, g, w, call.rows, quantised_g=g_dgrad, quantised_w=w_dgrad)
            del g_dgrad, w_dgrad
            if precision.spec(FPROP_X).clip_gradient:
                partial = clipped_input(precision, partial, x.wait(), call.rows)
            partial = turned_back(precision, DGRAD_W, partial)
            dx = exchange.start_reduce(partial)
            if not exchange.reduces:
                hook(BACKWARD, POST, "grad_input", dx.wait())
        if needs_dw:
            dw = wgrad(precision, g, x.wait(), call.rows, quantised_g=g_wgrad, quantised_x=x_wgrad)
            dw = turned_back(precision, WGRAD_X, clipped_gradient(precision, FPROP_W, dw, w))
        if dx is not None and exchange.reduces:
            hook(BACKWARD, POST, "grad_input", dx.wait())
        if dw is not None:
            hook(BACKWARD, POST, "grad_weight", dw)
        return None if dx is None else dx.wait(), dw, None


class LinearLayer:
    """What the precision map, captures and the proof need of a linear layer, whatever multiplies its operands."""

    #: `set_precision` sets it after the model is built.
    precision: ModulePrecision
    hook: TensorHook = staticmethod(no_hook)
    #: A routed expert's tokens of this micro-batch; None if they are of one sequence or are the whole micro-batch.
    rows: Rows | None = None
    #: Replaced by `share_weight_copies`; this default stores nothing.
    copies: WeightCopies = WeightCopies()


class SchemeLinear(LinearLayer):
    """The common part of both parallel linear layers with the scheme's products."""

    def _forward_impl(
        self,
        input: Tensor,  # noqa: A002  (Megatron calls with this keyword)
        weight: Tensor,
        bias: Tensor | None = None,
        gradient_accumulation_fusion: bool = False,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        grad_output_buffer: object = None,
        wgrad_deferral_limit: object = None,
        tp_group: Any = None,
        gtp_remat_size: int = 1,
    ) -> Tensor:
        """Megatron calls this with keywords; one that is not listed is an error, since it may change the product."""
        if gradient_accumulation_fusion:
            raise ConfigError(
                "linear layers do not support gradient-accumulation fusion: it multiplies the weight gradient itself, "
                "and without the scheme's quantisation; got gradient_accumulation_fusion=True"
            )
        if gtp_remat_size > 1:
            raise ConfigError(
                "linear layers do not support weights that ranks share and gather for each product; got "
                f"gtp_remat_size={gtp_remat_size}, which must be 1"
            )
        exchange = NO_EXCHANGE
        if allreduce_dgrad or sequence_parallel:
            exchange = Exchange(tp_group, divides_tokens=sequence_parallel)
        call = _Call(
            self.precision,
            self.hook,
            self.rows,
            self.copies,
            torch.is_grad_enabled(),
            exchange,
        )
        output: Tensor = _Linear.apply(input, weight, call)  # type: ignore[no-untyped-call]
        if bias is None:
            return output
        self._show_output(output)
        return output + bias

    def _show_output(self, output: Tensor) -> None:
        if output.numel():
            self.hook(FORWARD, POST, "output", output)


class SchemeColumnParallelLinear(SchemeLinear, ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's ColumnParallelLinear (qkv, fc1) with the scheme's products."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Megatron's forward pass; the output, a rank's columns without a bias, goes to the hook."""
        output, bias = ColumnParallelLinear.forward(self, *args, **kwargs)
        if self.bias is None or self.skip_bias_add:
            self._show_output(output)
        return output, bias


class SchemeOutputLayer(SchemeColumnParallelLinear):
    """The output layer. Its float32 logits are shown as a copy: Megatron's loss works on them in place."""

    def _show_output(self, output: Tensor) -> None:
        is_changed = output.dtype is torch.float32 and self.hook is not no_hook
        super()._show_output(output.detach().clone() if is_changed else output)


class SchemeRowParallelLinear(SchemeLinear, RowParallelLinear):  # type: ignore[misc]
    """Megatron's RowParallelLinear (proj, fc2) with the scheme's products."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Megatron's forward pass; the output, reduced over the ranks that share the layer, goes to the hook."""
        output, bias = RowParallelLinear.forward(self, input_)
        self._show_output(output)
        return output, bias
