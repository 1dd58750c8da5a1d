"""Faults of the norms of a scheme: gains, results, and what is shown of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantexp.formats import quantise, resolve
from tests.proof.lies.planting import ALWAYS, Operand, Planter, When, Where

from .fault import Group, add

_GAIN, _RESULT = (Where(slots=f"norm.fprop.{operand}") for operand in "wy")


class _Valued(torch.autograd.Function):
    """The values of another tensor, the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _operand(
    name: str, line: str, change: Callable[[Operand], Tensor], where: Where, when: When = ALWAYS
) -> None:
    add(name, line, Group.SLOT, lambda p: p.operands(change, where, when), "norm")


def _forward(planter: Planter, forward: Callable[[Any, Any, Tensor], Tensor]) -> None:
    """Replace the norms' forward pass by `forward(original, module, x)`."""
    from quantexp.training.megatron.norm import SchemeRMSNorm

    def make(original: Any) -> Any:
        def replaced(module: Any, x: Tensor) -> Tensor:
            planter.fire()
            return forward(original, module, x)

        return replaced

    planter.method(SchemeRMSNorm, "forward", make)


def _shown_alone(original: Any, module: Any, x: Tensor) -> Tensor:
    """The honest gain is shown, and the parameter multiplies; the result is rounded as declared."""
    from quantexp.quant.sites import NORM_Y

    original(module, x)
    y = functional.rms_norm(x, module.normalized_shape, module.weight, module.eps)
    rounded: Tensor = module._rounded(NORM_Y, y)
    return rounded


def _other_gradient(original: Any, module: Any, x: Tensor) -> Tensor:
    """The result is honest, and its gradient is that of a norm with twice the gain."""
    y: Tensor = original(module, x)
    other = functional.rms_norm(x, module.normalized_shape, 2 * module.weight, module.eps)
    valued: Tensor = _Valued.apply(other, y.detach())
    return valued


_operand("gains unrounded", "norms use their parameters as they are", lambda o: o.x, _GAIN)
_operand(
    "gains in E5M2",
    "gains are rounded to E5M2, not E4M3",
    lambda o: quantise(o.x, resolve("mxfp8_e5m2")),
    _GAIN,
)
_operand("results of norms unrounded", "what leaves a norm is not rounded", lambda o: o.x, _RESULT)
_operand(
    "results of norms unrounded from 3",
    "what leaves a norm is not rounded, from iteration 3 on",
    lambda o: o.x,
    _RESULT,
    When(3),
)
add(
    "gains shown alone",
    "norms show the rounded gain and use the parameter",
    Group.HIDDEN,
    lambda p: _forward(p, _shown_alone),
    "norm",
)
add(
    "norm's gradient doubled",
    "x gets the gradient of a norm with twice the gain",
    Group.RESULT,
    lambda p: _forward(p, _other_gradient),
    "norm",
)


def _gain(since: int, kept: float = 0.5) -> Callable[[Planter], None]:
    """Part of the gain gets no gradient, in every norm; what leaves it stays."""

    def plant(planter: Planter) -> None:
        def make(original: Any) -> Any:
            def rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Tensor:
                if weight is not None and planter.place.iteration >= since:
                    planter.fire()
                    rest = weight.detach() * (1 - kept)
                    weight = rest + weight * kept if kept else rest
                result: Tensor = original(x, shape, weight, eps)
                return result

            return rms_norm

        planter.attribute(functional, "rms_norm", make(functional.rms_norm))

    return plant


add("gain's gradient halved", "gains get half of their gradient", Group.RESULT, _gain(1))
add(
    "gain's gradient halved from 2",
    "gains get half of their gradient from iteration 2 on",
    Group.RESULT,
    _gain(2),
)
add(
    "gains without a gradient from 2",
    "gains are constants from iteration 2 on",
    Group.RESULT,
    _gain(2, kept=0.0),
)
