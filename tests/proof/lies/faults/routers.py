"""What a router takes back is another than its weights and the balancing loss give, or that loss is another."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tests.proof.lies.planting import Planter

from .fault import Group, add

_MOE = "megatron.core.transformer.moe"
_E5M2 = torch.float8_e5m2


def _method(
    module: str, owner: str, name: str, make: Callable[[Any], Any], since: int = 1
) -> Callable[[Planter], None]:
    """Another method of one of Megatron's classes; `make` takes the original."""

    def plant(planter: Planter) -> None:
        def with_planter(original: Any) -> Any:
            changed = make(original)

            def method(*args: Any, **kwargs: Any) -> Any:
                if planter.place.iteration < since:
                    return original(*args, **kwargs)
                planter.fire()
                return changed(*args, **kwargs)

            return method

        planter.method(vars(import_module(f"{_MOE}.{module}"))[owner], name, with_planter)

    return plant


def _router(name: str, make: Callable[[Any], Any], since: int = 1) -> Callable[[Planter], None]:
    return _method("router", "TopKRouter", name, make, since)


def _weights(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Of what a function returns, the weights are changed."""

    def make(original: Any) -> Any:
        def returned(*args: Any, **kwargs: Any) -> Any:
            probs, chosen = original(*args, **kwargs)
            return change(probs), chosen

        return returned

    return make


def _with_gradient(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A tensor with another gradient."""

    def changed(x: Tensor) -> Tensor:
        own = x.view_as(x)
        if own.requires_grad:
            own.register_hook(change)
        return own

    return changed


def _on_logits(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """The router chooses from these logits."""

    def make(original: Any) -> Any:
        def routing(router: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(router, change(logits), *args, **kwargs)

        return routing

    return make


def _twice(original: Any) -> Any:
    def attach(router: Any, *args: Any, **kwargs: Any) -> Any:
        probs = original(router, *args, **kwargs)
        return original(router, probs, *args[1:], **kwargs)

    return attach


def _of_all_sequences(original: Any) -> Any:
    """The balancing loss of each sequence is that of all of them."""

    def apply(
        router: Any, probs: Tensor, scores: Tensor, chosen: Tensor, T: int, B: int, **kwargs: Any
    ) -> Any:
        return original(router, probs, scores, chosen, T * B, 1, **kwargs)

    return apply


for _name, _line, _plant in (
    (
        "router's input detached",
        "what enters a router gets no gradient from it",
        _router("gating", lambda of: lambda router, x: of(router, x.detach())),
    ),
    (
        "router's input detached before it from 2",
        "a router gets a copy of the stream without a graph, from iteration 2 on",
        _method(
            "moe_layer",
            "MoELayer",
            "route",
            lambda of: lambda moe, x, *args, **kwargs: of(moe, x.detach(), *args, **kwargs),
            since=2,
        ),
    ),
    (
        "weights detached",
        "a router does not learn from the weights of experts",
        _router("routing", _weights(Tensor.detach)),
    ),
    (
        "weights detached behind the router",
        "the same, where the rows are sent",
        _method("moe_layer", "MoELayer", "route", _weights(Tensor.detach)),
    ),
    (
        "gradient of weights halved",
        "a router learns half of what the weights of experts give",
        _router("routing", _on_logits(_with_gradient(lambda g: g / 2))),
    ),
    (
        "gradient of logits in fp8 from 2",
        "the gradient of a router's logits is rounded to E5M2, from iteration 2 on",
        _router(
            "routing",
            _on_logits(_with_gradient(lambda g: (g * 4096).to(_E5M2).to(g.dtype) / 4096)),
            since=2,
        ),
    ),
    (
        "gradient of the router's input halved",
        "the stream gets half of a router's gradient",
        _router("gating", lambda of: lambda r, x: of(r, _with_gradient(lambda g: g / 2)(x))),
    ),
    (
        "balancing loss twice",
        "the balancing loss is added twice",
        _router("attach_and_log_load_balancing_loss", _twice),
    ),
    (
        "another coefficient",
        "the balancing loss has 1.01 of its coefficient",
        _router("get_aux_loss_coeff", lambda of: lambda *args: 1.01 * of(*args)),
    ),
    (
        "no balancing loss from 2",
        "experts are not balanced, from iteration 2 on",
        _router("is_aux_loss_enabled", lambda of: lambda router: False, since=2),
    ),
    (
        "balancing loss of all sequences",
        "the experts are balanced over the micro-batch, not in each sequence",
        _router("_apply_seq_aux_loss", _of_all_sequences),
    ),
):
    add(_name, _line, Group.RESULT, _plant, "experts")


def _unscaled(planter: Planter) -> None:
    """The derivative of the balancing loss is not divided by the number of micro-batches."""
    scaler: Any = import_module(f"{_MOE}.moe_utils").MoEAuxLossAutoScaler

    def make(original: Any) -> Any:
        def set_scale(scale: Tensor) -> Any:
            planter.fire()
            return original(2 * scale)

        return set_scale

    planter.method(scaler, "set_loss_scale", make)


def _smaller(planter: Planter) -> None:
    def make(original: Any) -> Any:
        def taken(device: Any) -> Any:
            planter.fire()
            return 0.999 * original(device)

        return taken

    planter.function("take_balancing_loss", make)


add(
    "balancing loss's gradient doubled",
    "the balancing loss counts as if a step had half of its micro-batches",
    Group.RESULT,
    _unscaled,
    "experts",
)
add(
    "smaller balancing loss",
    "the balancing loss is 0.999 of the routers'",
    Group.STATE,
    _smaller,
    "experts",
)
