"""Faults of fused attention, whose kernel shows nothing between its operands and its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.proof.lies.planting import ALWAYS, Planter, When

from .fault import Group, add


def _fused_from_originals(planter: Planter, which: str = "qkv", when: When = ALWAYS) -> None:
    """The fused kernel multiplies quantised operands, and its output is that of the originals of some of them."""
    from quantexp.quant.attention import fused

    def forward(original: Any) -> Any:
        def run(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
            o: Tensor = original(ctx, q, k, v, call)
            if not when.holds(planter.place):
                return o
            planter.fire()
            with _disable_current_modes(), torch.no_grad():
                q, k, v = _originals(which, (q, k, v), ctx.operands)
                return fused._kernel(q, k, v, call.softmax_scale, call.mask).to(o.dtype)

        return run

    planter.method(fused._Fused, "forward", forward)


def _originals(which: str, sources: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """q, k and v, each before quantisation if its letter is given."""
    pairs = zip("qkv", sources, operands, strict=True)
    return [(x if name in which else operand).detach() for name, x, operand in pairs]


def _fused_backward_from_originals(
    planter: Planter, which: str = "qkv", when: When = ALWAYS
) -> None:
    """The backward pass of the fused kernel is that of the originals of some operands."""
    from quantexp.quant.attention import fused

    def forward(original: Any) -> Any:
        def run(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
            ctx.sources = [x.detach() for x in (q, k, v)]
            return original(ctx, q, k, v, call)

        return run

    def backward(original: Any) -> Any:
        def run(ctx: Any, *grads: Tensor) -> Any:
            honest = original(ctx, *grads)
            if not when.holds(planter.place):
                return honest
            planter.fire()
            with _disable_current_modes(), torch.enable_grad():
                operands = _originals(which, ctx.sources, ctx.operands)
                q, k, v = leaves = [x.clone().requires_grad_() for x in operands]
                o = fused._kernel(q, k, v, ctx.call.softmax_scale, ctx.call.mask)
                other = torch.autograd.grad(o, leaves, grads[0])
            return *other, *honest[3:]

        return run

    planter.method(fused._Fused, "forward", forward)
    planter.method(fused._Fused, "backward", backward)


def _fused_times(factor: float, method: str) -> Callable[[Planter], None]:
    """What the fused kernel returns, forward or backward, is multiplied."""

    def plant(planter: Planter) -> None:
        from quantexp.quant.attention import fused

        def make(original: Any) -> Any:
            def run(ctx: Any, *args: Any) -> Any:
                honest = original(ctx, *args)
                planter.fire()
                if isinstance(honest, Tensor):
                    return honest * factor
                return tuple(x if x is None else x * factor for x in honest)

            return run

        planter.method(fused._Fused, method, make)

    return plant


for _of, _words, _letters, _when in (
    ("originals", "q, k and v", "qkv", ALWAYS),
    ("originals from 2", "q, k and v, from iteration 2 on,", "qkv", When(2)),
    ("the original q", "q", "q", ALWAYS),
    ("the original k", "k", "k", ALWAYS),
):
    add(
        f"fused output of {_of}",
        f"the fused kernel's output is that of {_words} before quantisation",
        Group.HIDDEN,
        partial(_fused_from_originals, which=_letters, when=_when),
        "fused",
    )
    add(
        f"fused gradients of {_of}",
        f"the fused kernel's gradients are those of {_words} before quantisation",
        Group.HIDDEN,
        partial(_fused_backward_from_originals, which=_letters, when=_when),
        "fused",
    )
for _factor in (0.9, 1.25):
    for _method, _words in ("forward", "output is"), ("backward", "gradients are"):
        add(
            f"fused {_method} times {_factor}",
            f"the fused kernel's {_words} {_factor} times what they should be",
            Group.RESULT,
            _fused_times(_factor, _method),
            "fused",
        )
