"""The optimizer's step is another than configured: its rate, its decay, its moments, its gradient, its weights."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from tests.proof.lies.planting import Planter

from .fault import Group, add

#: Called with Adam before or after its step; what it returns before is called after.
_Act = Callable[[Any], Callable[[], None] | None]


def _step(before: _Act | None = None, after: _Act | None = None, since: int = 1) -> Any:
    """Adam's step, with something before or after it."""

    def plant(planter: Planter) -> None:
        def make(original: Any) -> Any:
            @torch.no_grad()
            def step(adam: Any, *args: Any, **kwargs: Any) -> Any:
                if planter.place.iteration < since:
                    return original(adam, *args, **kwargs)
                planter.fire()
                undo = None if before is None else before(adam)
                try:
                    return original(adam, *args, **kwargs)
                finally:
                    if undo is not None:
                        undo()
                    if after is not None:
                        after(adam)

            vars(step)["hooked"] = True  # torch wraps the steps of classes that are not
            return step

        planter.method(next(c for c in AdamW.__mro__ if "step" in vars(c)), "step", make)

    return plant


def _option(name: str, change: Callable[[Any], Any]) -> _Act:
    """Another value of an option of all groups."""

    def before(adam: Any) -> Callable[[], None]:
        kept = [group[name] for group in adam.param_groups]
        for group in adam.param_groups:
            group[name] = change(group[name])

        def undo() -> None:
            for group, value in zip(adam.param_groups, kept, strict=True):
                group[name] = value

        return undo

    return before


def _each(change: Callable[[Tensor, Any], object]) -> _Act:
    """Something for each parameter and its state."""

    def act(adam: Any) -> None:
        for group in adam.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    change(w, adam.state[w])

    return act


def _counted_as_many(adam: Any) -> Callable[[], None]:
    """As if 1,000 steps were behind: no bias correction."""
    for state in adam.state.values():
        state["step"] += 1000

    def undo() -> None:
        for state in adam.state.values():
            state["step"] -= 1000

    return undo


def _frozen(adam: Any) -> Callable[[], None]:
    """The largest matrix stays."""
    w = max((p for group in adam.param_groups for p in group["params"]), key=Tensor.numel)
    kept = w.detach().clone()

    def undo() -> None:
        w.copy_(kept)

    return undo


def _nan(w: Tensor, state: Any) -> None:
    """The first moment of matrices is no number in every other row."""
    if w.dim() > 1:
        state["exp_avg"][::2] = torch.nan


def _in_e5m2(w: Tensor, _: Any) -> None:
    assert w.grad is not None
    w.grad.copy_((w.grad * 4096).to(torch.float8_e5m2).to(w.grad.dtype) / 4096)


for _name, _line, _plant in (
    (
        "lr doubled from 3",
        "the optimizer's rate is twice the schedule's, from iteration 3 on",
        _step(_option("lr", lambda lr: 2 * lr), since=3),
    ),
    (
        "weight decay skipped",
        "no weight decays",
        _step(_option("weight_decay", lambda _: 0.0)),
    ),
    (
        "norms decay",
        "gains and biases decay like matrices",
        _step(_option("weight_decay", lambda _: 0.1)),
    ),
    (
        "another beta2",
        "the second moment has another beta",
        _step(_option("betas", lambda betas: (betas[0], 0.999))),
    ),
    (
        "bias correction missing from 2",
        "moments are not corrected for their beginning at zero, from iteration 2 on",
        _step(_counted_as_many, since=2),
    ),
    (
        "moments in bf16 from 2",
        "the first moment is rounded to bf16, which no scheme declares, from iteration 2 on",
        _step(after=_each(lambda w, s: s["exp_avg"].copy_(s["exp_avg"].bfloat16())), since=2),
    ),
    (
        "moments that are NaN from 2",
        "half of the first moments are NaN after the step, from iteration 2 on",
        _step(after=_each(_nan), since=2),
    ),
    (
        "no master weights",
        "main weights are rounded to bf16 after each step",
        _step(after=_each(lambda w, s: w.copy_(w.bfloat16()))),
    ),
    (
        "gradients in fp8 for the step",
        "gradients are rounded to E5M2 between the last pass and the step",
        _step(_each(_in_e5m2)),
    ),
    (
        "a matrix frozen from 2",
        "the largest matrix does not move, from iteration 2 on",
        _step(_frozen, since=2),
    ),
):
    add(_name, _line, Group.STATE, _plant, is_of_step=True)


def _replaced(module: str, name: str, make: Callable[[Planter, Any], Any]) -> Any:
    def plant(planter: Planter) -> None:
        owner = import_module(module)
        planter.attribute(owner, name, make(planter, vars(owner)[name]))

    return plant


def _not_clipped(planter: Planter, _: Any) -> Any:
    return lambda *args, **kwargs: planter.fire()


def _quarter(planter: Planter, original: Any) -> Any:
    def squares(x: Tensor) -> Tensor:
        planter.fire()
        result: Tensor = original(x) / 4
        return result

    return squares


def _truncated(planter: Planter, original: Any) -> Any:
    """The model's weights are the main ones without the lower half of their bits."""

    def step(optimizer: Any, *args: Any) -> Any:
        result = original(optimizer, *args)
        from quantexp.training.megatron.finite import chained
        from quantexp.training.megatron.state_shards import _mains

        with torch.no_grad():
            for parameter, main, _ in (m for each in chained(optimizer) for m in _mains(each)):
                if parameter.dtype is torch.bfloat16 and parameter.shape == main.shape:
                    planter.fire()
                    parameter.copy_((main.view(torch.int32) & -65536).view(torch.float32))
        return result

    return step


def _left_out(planter: Planter, original: Any) -> Any:
    """The optimizer does not have one matrix, which nothing moves."""

    def made(config: Any, models: Any, *args: Any, **kwargs: Any) -> Any:
        planter.fire()
        matrices = [p for p in models[0].parameters() if p.dim() > 1]
        matrices[-1].requires_grad_(False)
        try:
            return original(config, models, *args, **kwargs)
        finally:
            matrices[-1].requires_grad_(True)

    return made


_MEGATRON = "quantexp.training.megatron"
for _name, _line, _plant in (
    (
        "a matrix left out",
        "the optimizer is made without one matrix",
        _replaced(f"{_MEGATRON}.step", "get_megatron_optimizer", _left_out),
    ),
    (
        "not clipped",
        "gradients are not clipped",
        _replaced(f"{_MEGATRON}.finite", "clip_grad_by_total_norm_fp32", _not_clipped),
    ),
    (
        "norm halved",
        "the norm of the gradient, which clips it, is half of what it is",
        _replaced(f"{_MEGATRON}.grad_norm", "sum_of_squares", _quarter),
    ),
    (
        "model weights truncated",
        "the weights of the model are the main weights, rounded towards zero",
        _replaced(f"{_MEGATRON}.watched_step", "step_if_finite", _truncated),
    ),
):
    add(_name, _line, Group.STATE, _plant, is_of_step=True)


def _of_muon(name: str, make: Callable[[Planter, Any], Any]) -> Any:
    return _replaced(f"{_MEGATRON}.muon", name, make)


def _as_it_is(planter: Planter, _: Any) -> Any:
    """The momentum with the norm of an orthogonal matrix."""

    def normalised(x: Tensor) -> Tensor:
        planter.fire()
        return x / x.norm().clamp(min=1e-7) * min(x.shape) ** 0.5

    return normalised


def _fewer_steps(planter: Planter, original: Any) -> Any:
    def orthogonalised(x: Tensor) -> Tensor:
        planter.fire()
        owner = import_module(f"{_MEGATRON}.muon")
        kept, vars(owner)["_STEPS"] = vars(owner)["_STEPS"], 4
        try:
            result: Tensor = original(x)
            return result
        finally:
            vars(owner)["_STEPS"] = kept

    return orthogonalised


def _fused(planter: Planter, _: Any) -> Any:
    """q, k and v, and gate and up, are orthogonalised as one matrix."""

    def published(matrix: Any) -> Any:
        planter.fire()
        yield torch.arange(matrix.parameter.shape[0])

    return published


for _name, _line, _plant in (
    (
        "momentum not orthogonalised",
        "Muon moves matrices along their momentum as it is",
        _of_muon("orthogonalised", _as_it_is),
    ),
    (
        "four Newton-Schulz steps",
        "Muon orthogonalises in four steps, not five",
        _of_muon("orthogonalised", _fewer_steps),
    ),
    (
        "fused matrices orthogonalised whole",
        "q, k and v are one matrix for Muon",
        lambda p: p.method(
            import_module(f"{_MEGATRON}.muon").Matrix, "published", lambda o: _fused(p, o)
        ),
    ),
    (
        "Muon's updates 2% longer",
        "Muon's factor is 0.204 in the place of 0.2",
        lambda p: p.attribute(import_module(f"{_MEGATRON}.muon"), "_RMS", 0.204) or p.fire(),
    ),
):
    add(_name, _line, Group.STATE, _plant, "muon", is_of_step=True)
