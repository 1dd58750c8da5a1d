"""Honest operands and a wrong result: scales, sums, rows, biases, what is added to a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.proof.lies.planting import ALWAYS, EVERYWHERE, Multiplication, Planter, When, Where

from .fault import Group, add

_Change = Callable[[Multiplication], Tensor | None]
_FORWARD, _DX, _DW = (Where(slots=f"linear.{p}.*") for p in ("fprop", "dgrad", "wgrad"))


def _add(
    name: str,
    line: str,
    change: _Change,
    where: Where = EVERYWHERE,
    when: When = ALWAYS,
    tags: str = "",
) -> None:
    add(name, line, Group.RESULT, lambda planter: planter.products(change, where, when), tags)


def _part(m: Multiplication, rows: slice, factor: float) -> Tensor:
    y = m.y.clone()
    flat = y.view(-1, y.shape[-1])
    flat[rows] *= factor
    return y


def _accumulated_in_16_bits(m: Multiplication) -> Tensor:
    """Partial sums over 16 of K, each added and rounded to 8 bits of significand."""
    a, b = m.honest_a.float(), m.honest_b.float()
    if b.dim() == 2:
        a = a.flatten(0, -2)
    total = torch.zeros(())
    for left, right in zip(a.split(16, -1), b.split(16, -2), strict=True):
        with torch.utils._python_dispatch._disable_current_modes():
            partial = left @ right
        total = (total + partial).bfloat16().float()
    return total * _post(m)


def _post(m: Multiplication) -> float:
    """The scale of the honest result, also that of operands times 3/4."""
    a, b = m.honest_a.float(), m.honest_b.float()
    if b.dim() == 2:
        a = a.flatten(0, -2)
    with torch.utils._python_dispatch._disable_current_modes():
        plain = a @ b
    y = m.y.float().reshape(plain.shape)
    at = plain.abs().argmax()
    if plain.flatten()[at] == 0:
        return 1.0
    return float(y.flatten()[at] / plain.flatten()[at])


def _without_last_block(m: Multiplication) -> Tensor:
    """The last 32 terms of each sum are lost, as where a kernel has no tail."""
    a, b = m.honest_a.float(), m.honest_b.float()
    if b.dim() == 2:
        a = a.flatten(0, -2)
    post = _post(m)
    with torch.utils._python_dispatch._disable_current_modes():
        return (a[..., :-32] @ b[..., :-32, :]) * post


_add("y plus 1 part in 32", "y is larger by 1/32", lambda m: m.y * (1 + 2**-5), _FORWARD)
_add("y coarse", "y is rounded to 4 bits of significand", lambda m: _coarse(m.y), _FORWARD)
_add("y in mxfp8", "y itself is quantised", lambda m: _mxfp8(m.y), _FORWARD)
_add(
    "a row of y", "one row of y in 32 is zero", lambda m: _part(m, slice(5, None, 32), 0), _FORWARD
)
_add("rows of dx", "one row of dx in 16 is zero", lambda m: _part(m, slice(3, None, 16), 0), _DX)
_add(
    "rows of dx from 3",
    "one row of dx in 16 is zero, from iteration 3 on",
    lambda m: _part(m, slice(3, None, 16), 0),
    _DX,
    When(3),
)
_add("columns of dw", "the last row of dw is zero", lambda m: _part(m, slice(-1, None), 0), _DW)
_add("dw twice", "dw is added twice", lambda m: m.y * 2, _DW)
_add(
    "dw twice in micro-batch 1",
    "dw of the last micro-batch is added twice",
    lambda m: m.y * 2,
    _DW,
    When(micro_batch=1),
)
_add("dw halved from 2", "dw is halved from iteration 2 on", lambda m: m.y / 2, _DW, When(2))
_add(
    "dw negated in layer 1",
    "dw has the wrong sign in one layer",
    lambda m: -m.y,
    Where(slots="linear.wgrad.*", layer=1),
)
_add("dx negated", "dx has the wrong sign", lambda m: -m.y, _DX)
_add("dw in mxfp8", "dw itself is quantised", lambda m: _mxfp8(m.y), _DW)
_add("16-bit sums", "sums over K are rounded to bf16 after every 16 terms", _accumulated_in_16_bits)
_add("without the tail", "the last 32 terms of each sum are lost", _without_last_block)
_add(
    "scale twice",
    "the softmax scale is applied twice",
    lambda m: m.y * 32**-0.5,
    Where(slots="qk.fprop.*"),
)
_add(
    "no softmax scale",
    "scores without 1/sqrt(d)",
    lambda m: m.y * 32**0.5,
    Where(slots="qk.fprop.*"),
)
_add("dq twice", "dq is doubled", lambda m: m.y * 2, Where(slots="qk.dgrad_q.*"))
_add(
    "dk of one head",
    "dk lacks the group's other heads",
    lambda m: _one_head(m),
    Where(slots="qk.dgrad_k.*"),
)
_add(
    "dv of one head",
    "dv lacks the group's other heads",
    lambda m: _one_head(m),
    Where(slots="pv.dgrad_v.*"),
)
_add(
    "dP zero",
    "dP is zero, so that q and k do not learn",
    lambda m: m.y * 0,
    Where(slots="pv.dgrad_p.*"),
)
_add(
    "o of the first tokens",
    "o is zero from the second half of the queries on",
    lambda m: _late_queries(m),
    Where(slots="pv.fprop.*"),
)


def _coarse(y: Tensor) -> Tensor:
    mantissa, exponent = y.float().frexp()
    return torch.ldexp((mantissa * 16).round() / 16, exponent)


def _mxfp8(y: Tensor) -> Tensor:
    from quantexp.formats import quantise

    return quantise(y.contiguous(), "mxfp8", axis=-1)


def _one_head(m: Multiplication) -> Tensor | None:
    """Of each group's heads the first alone counts."""
    if m.y.dim() != 3 or len(m.y) % 2:
        return None
    y = m.y.clone()
    y[1::2] = 0
    return y


def _late_queries(m: Multiplication) -> Tensor:
    y = m.y.clone()
    y[..., y.shape[-2] // 2 :, :] = 0
    return y


# A gradient of the transform that leaves its layer as it is


def _not_turned_back(planter: Planter) -> None:
    def make(original: Any) -> Any:
        def turned(precision: Any, slot: Any, gradient: Any) -> Any:
            if precision.spec(slot).copy is not None and gradient.numel():
                planter.fire()
            return gradient

        return turned

    planter.function("turned_back", make)


add(
    "not turned back",
    "gradients by transformed forward copies stay those of the transform",
    Group.RESULT,
    _not_turned_back,
    "turned",
)


# 3/4 without compensation, whatever computes it


def _uncompensated(planter: Planter) -> None:
    def make(original: Any) -> Any:
        def post(*specs: Any) -> float:
            scale: float = original(*specs)
            if scale != 1.0:
                planter.fire()
            return 1.0

        return post

    planter.function("post_scale", make)


add(
    "3/4 not compensated",
    "products of operands times 3/4 are not multiplied by 4/3",
    Group.RESULT,
    _uncompensated,
    "drawn",
)

# Borders


def _outputs(change: Callable[[Tensor], Tensor], when: When = ALWAYS) -> Callable[[Planter], None]:
    """Change what `_forward_impl` returns: after the product, before the module's end."""

    def plant(planter: Planter) -> None:
        from quantexp.training.megatron.linear import SchemeLinear

        def make(original: Any) -> Any:
            def forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
                y: Tensor = original(module, *args, **kwargs)
                if y.numel() == 0 or not when.holds(planter.place):
                    return y
                planter.fire()
                return change(y)

            return forward

        planter.method(SchemeLinear, "_forward_impl", make)

    return plant


class _Scaled(torch.autograd.Function):
    """The identity with a wrong derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.5


add(
    "output scaled",
    "what leaves a linear layer is 1.25 times its product",
    Group.RESULT,
    _outputs(lambda y: y * 1.25),
)
add(
    "output scaled from 3",
    "the same from iteration 3 on",
    Group.RESULT,
    _outputs(lambda y: y * 1.25, When(3)),
)
add(
    "gradient scaled",
    "the gradient that enters a linear layer is 1.5 times that of its output",
    Group.RESULT,
    _outputs(lambda y: _Scaled.apply(y)),
)
add(
    "output detached",
    "no gradient reaches a linear layer in every second call",
    Group.RESULT,
    lambda planter: _detached(planter),
)


def _detached(planter: Planter) -> None:
    calls = [0]

    def change(y: Tensor) -> Tensor:
        calls[0] += 1
        return y + (y.detach() - y) if calls[0] % 8 == 0 else y

    _outputs(change)(planter)


def _bias_dropped(planter: Planter) -> None:
    from quantexp.training.megatron.linear import SchemeLinear

    def make(original: Any) -> Any:
        def forward(module: Any, *args: Any, bias: Any = None, **kwargs: Any) -> Tensor:
            y: Tensor = original(module, *args, bias=None, **kwargs)
            if bias is None:
                return y
            planter.fire()
            return y + 0 * bias + 0.01

        return forward

    planter.method(SchemeLinear, "_forward_impl", make)


def _bias_doubled(planter: Planter) -> None:
    """The bias gets twice its gradient."""
    from quantexp.training.megatron.linear import SchemeLinear

    def make(original: Any) -> Any:
        def forward(module: Any, *args: Any, bias: Any = None, **kwargs: Any) -> Tensor:
            if bias is not None:
                planter.fire()
                bias = 2 * bias - bias.detach()
            y: Tensor = original(module, *args, bias=bias, **kwargs)
            return y

        return forward

    planter.method(SchemeLinear, "_forward_impl", make)


add(
    "bias's gradient doubled",
    "a bias gets twice its gradient",
    Group.RESULT,
    _bias_doubled,
    "bias",
)
add("bias dropped", "the bias is replaced by 0.01", Group.RESULT, _bias_dropped, "bias")


def _gradients(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], when: When = ALWAYS
) -> Callable[[Planter], None]:
    """Change dx and dw as a linear layer's autograd function returns them."""

    def plant(planter: Planter) -> None:
        from quantexp.training.megatron.linear import _Linear

        def make(original: Any) -> Any:
            def backward(ctx: Any, *grads: Tensor) -> Any:
                dx, dw, *rest = original(ctx, *grads)
                if dx is None or dw is None or dx.numel() == 0 or not when.holds(planter.place):
                    return (dx, dw, *rest)
                planter.fire()
                return (*change(dx, dw), *rest)

            return backward

        planter.method(_Linear, "backward", make)

    return plant


add(
    "dx dropped",
    "a linear layer returns a dx of zeros",
    Group.RESULT,
    _gradients(lambda dx, dw: (dx * 0, dw)),
)
add(
    "dw doubled",
    "a linear layer returns twice its dw",
    Group.RESULT,
    _gradients(lambda dx, dw: (dx, dw * 2)),
)
add(
    "dw doubled from 2",
    "the same from iteration 2 on",
    Group.RESULT,
    _gradients(lambda dx, dw: (dx, dw * 2), When(2)),
)


def _main_grad(
    change: Callable[[Tensor], Tensor], dims: int = 2, when: When = ALWAYS
) -> Callable[[Planter], None]:
    """Change dw, or the gradients of vectors, between the layer that returns it and the fp32 main gradient."""

    def plant(planter: Planter) -> None:
        from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel

        original = DistributedDataParallel._make_backward_post_hook

        def make(ddp: Any, parameter: Any) -> Any:
            hook = original(ddp, parameter)

            def changed(*args: Any) -> Any:
                is_chosen = parameter.dim() == dims and when.holds(planter.place)
                if parameter.grad is not None and is_chosen:
                    planter.fire()
                    parameter.grad = change(parameter.grad).to(parameter.grad.dtype)
                return hook(*args)

            return changed

        planter.attribute(DistributedDataParallel, "_make_backward_post_hook", make)

    return plant


add(
    "main gradient coarse",
    "dw is rounded to 4 bits before it is added to the main gradient",
    Group.RESULT,
    _main_grad(_coarse),
)
add(
    "main gradient twice",
    "dw is added twice to the main gradient",
    Group.RESULT,
    _main_grad(lambda dw: dw * 2),
)

add(
    "gradients of vectors lost in micro-batch 1",
    "gains and biases get no gradient from the last micro-batch",
    Group.RESULT,
    _main_grad(lambda g: g * 0, 1, When(micro_batch=1)),
)


def _first_lost(planter: Planter) -> None:
    """The second micro-batch's gradients take the place of the first's."""
    from quantexp.training.megatron.step import Stepper

    def make(original: Any) -> Any:
        def begin(stepper: Any, iteration: int, index: int, *rest: Any) -> Any:
            if index == 1 and planter.place.phase == "train":
                planter.fire()
                for chunk in stepper.chunks:
                    for parameter in chunk.parameters():
                        parameter.main_grad.zero_()
            return original(stepper, iteration, index, *rest)

        return begin

    planter.method(Stepper, "_begin", make)


add(
    "micro-batch 0 lost",
    "the main gradient has the last micro-batch alone",
    Group.RESULT,
    _first_lost,
)


def _attention_results(change: Callable[[Tensor], Tensor], name: str) -> Callable[[Planter], None]:
    def plant(planter: Planter) -> None:
        from quantexp.training.megatron.attention import SchemeAttention

        def make(original: Any) -> Any:
            def attention(module: Any, *args: Any) -> Tensor:
                o: Tensor = original(module, *args)
                planter.fire()
                return change(o)

            return attention

        planter.method(SchemeAttention, name, make)

    return plant


add(
    "o scaled",
    "what leaves attention is 1.25 times its product",
    Group.RESULT,
    _attention_results(lambda o: o * 1.25, "_attention"),
)
add(
    "dO scaled",
    "the gradient that enters attention is 1.5 times that of its output",
    Group.RESULT,
    _attention_results(lambda o: _Scaled.apply(o), "_attention"),
)


def _softmax(change: Callable[[Any, Tensor, Any], Tensor]) -> Callable[[Planter], None]:
    """Change the softmax between the two products, in the class that all paths share."""

    def plant(planter: Planter) -> None:
        from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax

        def make(original: Any) -> Any:
            def forward(module: Any, scores: Tensor, mask: Any, *rest: Any) -> Tensor:
                planter.fire()
                return change(lambda s: original(module, s, mask, *rest), scores, mask)

            return forward

        planter.method(FusedScaleMaskSoftmax, "forward", make)

    return plant


add(
    "softmax of twice the scores",
    "the softmax sees twice S",
    Group.RESULT,
    _softmax(lambda f, s, m: f(s * 2)),
)
add("P scaled", "P is 0.9 times the softmax", Group.RESULT, _softmax(lambda f, s, m: f(s) * 0.9))
add(
    "dS detached",
    "no gradient passes through the softmax",
    Group.RESULT,
    _softmax(lambda f, s, m: f(s.detach()) + 0 * s),
)


def _softmax_scale(planter: Planter) -> None:
    """The module has a softmax scale that its head width does not give."""

    def make(original: Any) -> Any:
        def build_chunks(*args: Any, **kwargs: Any) -> Any:
            chunks, config = original(*args, **kwargs)
            for chunk in chunks:
                for module in chunk.modules():
                    if hasattr(module, "softmax_scale"):
                        planter.fire()
                        module.softmax_scale *= 2
            return chunks, config

        return build_chunks

    planter.function("build_chunks", make)


add(
    "softmax scale of the module",
    "attention modules have twice the softmax scale",
    Group.RESULT,
    _softmax_scale,
)
