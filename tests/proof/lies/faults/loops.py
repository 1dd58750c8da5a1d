"""The training loop is another than configured: the model's settings, its passes, what happens between two steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from quantexp.training.megatron.state_shards import held_pieces
from tests.proof.lies.planting import Planter

from .fault import Group, add

_MEGATRON = "quantexp.training.megatron"


def _class(module: str, name: str) -> Any:
    return vars(import_module(f"{_MEGATRON}.{module}"))[name]


def _setting(name: str, value: object) -> Callable[[Planter], None]:
    """Megatron-Core's configuration has another value of a setting."""

    def plant(planter: Planter) -> None:
        def make(original: Any) -> Any:
            def config(*args: Any, **kwargs: Any) -> Any:
                planter.fire()
                result = original(*args, **kwargs)
                setattr(result, name, value)
                return result

            return config

        planter.function("transformer_config", make)

    return plant


for _name, _setting_name, _value, _tags in (
    ("another epsilon of norms", "layernorm_epsilon", 1e-3, ""),
    ("GELU in the place of SiLU", "activation_func", nn.functional.gelu, ""),
    ("dropout of 0.1", "hidden_dropout", 0.1, ""),
    ("a window of 16 tokens", "window_size", (16, 0), ""),
    ("one expert a token", "moe_router_topk", 1, "experts"),
    ("z-loss", "moe_z_loss_coeff", 0.1, "experts"),
):
    _line = f"Megatron-Core's {_setting_name} is {_value!r}"
    add(_name, _line, Group.PASS, _setting(_setting_name, _value), _tags)


def _built(change: Callable[[Any], object]) -> Callable[[Planter], None]:
    """Something for each chunk of the model."""

    def plant(planter: Planter) -> None:
        def make(original: Any) -> Any:
            def build(*args: Any, **kwargs: Any) -> Any:
                chunks, config = original(*args, **kwargs)
                for chunk in chunks:
                    planter.fire()
                    change(chunk)
                return chunks, config

            return build

        planter.function("build_chunks", make)

    return plant


def _keep_table(chunk: Any) -> None:
    kept: list[Tensor] = []
    plain = chunk.shared_embedding_or_output_weight

    def table() -> Tensor:
        if not kept:
            kept.append(plain().detach().clone())
        return kept[0]

    chunk.shared_embedding_or_output_weight = table


def _drop_norm(chunk: Any) -> None:
    chunk.decoder.final_layernorm = nn.Identity()


add(
    "output layer with the initial table",
    "a tied output layer multiplies with a copy of the table, which does not learn",
    Group.PASS,
    _built(_keep_table),
)
add(
    "last norm left out", "nothing normalises the stream at its end", Group.PASS, _built(_drop_norm)
)


def _last_micro_batch_dropped(planter: Planter) -> None:
    def make(original: Any) -> Any:
        def schedule(passes: Any, step: Any, batches: Any, number: int, forward_only: bool) -> Any:
            if forward_only:
                return original(passes, step, batches, number, forward_only)
            planter.fire()
            share = (number - 1) / number

            def scaled(*args: Any) -> Any:
                output, loss_of = step(*args)
                return output, lambda x: (share * (found := loss_of(x))[0], found[1])

            return original(passes, scaled, batches, number - 1, forward_only)

        return schedule

    planter.method(_class("passes", "Passes"), "_schedule", make)


add(
    "last micro-batch dropped",
    "the last micro-batch of a step has no pass, and the others count as before",
    Group.PASS,
    _last_micro_batch_dropped,
)


def _not_causal(planter: Planter) -> None:
    def make(original: Any) -> Any:
        def forward(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **others: Any) -> Any:
            planter.fire()
            T = len(k) * module.config.context_parallel_size
            none = torch.zeros(1, 1, T, T, dtype=torch.bool)
            return original(module, q, k, v, none, **others)

        return forward

    planter.method(_class("attention", "SchemeAttention"), "forward", make)


add("attention to later tokens", "no mask hides later tokens", Group.PASS, _not_causal)


def _training_samples_evaluated(planter: Planter) -> None:
    def make(original: Any) -> Any:
        def evaluate(passes: Any, held_out: Any) -> Any:
            planter.fire()
            first = next(iter(held_out))
            return original(passes, [first, *(first for _ in held_out)])

        return evaluate

    planter.method(_class("passes", "Passes"), "evaluate", make)


add(
    "one held-out batch again and again",
    "an evaluation takes its first micro-batch for all",
    Group.PASS,
    _training_samples_evaluated,
    "validation",
)


def _around_steps(
    before: Callable[[Any], object] | None, after: Callable[[Any], object] | None
) -> Callable[[Planter], None]:
    """Something for what the optimizer holds, after the passes of a step or after the whole."""

    def plant(planter: Planter) -> None:
        owner = _class("step", "Stepper")

        def act(stepper: Any, change: Callable[[Any], object]) -> None:
            planter.fire()
            with torch.no_grad():
                for held in held_pieces(stepper.optimizer, stepper.parts).values():
                    change(held)

        def in_loss(original: Any) -> Any:
            def mean_loss(stepper: Any, own: Any) -> Any:
                if before is not None:
                    planter.fire()
                    for part in stepper.parts.values():
                        before(part.tensor)
                return original(stepper, own)

            return mean_loss

        def in_step(original: Any) -> Any:
            def step(stepper: Any, *args: Any, **kwargs: Any) -> Any:
                metrics = original(stepper, *args, **kwargs)
                if after is not None:
                    act(stepper, after)
                return metrics

            return step

        planter.method(owner, "mean_loss", in_loss)
        planter.method(owner, "step", in_step)

    return plant


for _name, _line, _before, _after in (
    (
        "gradients halved before the step",
        "main gradients are halved after the passes",
        lambda w: w.main_grad.mul_(0.5),
        None,
    ),
    (
        "moments lost between steps",
        "the first moments are zero as each step begins",
        None,
        lambda held: held.moment(held.kinds[0]).zero_(),
    ),
    (
        "weights shrunk between steps",
        "main weights are 0.98 of what the last step left",
        None,
        lambda held: held.main.mul_(0.98),
    ),
):
    add(_name, _line, Group.STATE, _around_steps(_before, _after), is_of_step=True)


def _steps_left_out(norm: Callable[[float], float]) -> Callable[[Planter], None]:
    """Every other step is left out, and its norm is said to be another."""

    def plant(planter: Planter) -> None:
        owner = import_module(f"{_MEGATRON}.watched_step")
        original = vars(owner)["step_if_finite"]

        def step(optimizer: Any, *args: Any) -> Any:
            if planter.place.iteration % 2:
                return original(optimizer, *args)
            planter.fire()
            optimizer.prepare_grads()
            return False, norm(float(optimizer.get_grad_norm()))

        planter.attribute(owner, "step_if_finite", step)

    return plant


for _name, _norm in (
    ("every other step left out", float),
    ("every other step left out for a NaN", lambda _: math.nan),
    ("every other step left out for an overflow", lambda _: math.inf),
):
    _line = "steps with finite gradients are left out"
    add(_name, _line, Group.STATE, _steps_left_out(_norm), is_of_step=True)
for _name, _end in (("matrices by AdamW", ""), ("fc2 by AdamW", "linear_fc2.weight")):

    def _by_adam(planter: Planter, end: str = _end) -> None:
        def make(original: Any) -> Any:
            def is_matrix(parameter: Any) -> bool:
                planter.fire()
                return bool(original(parameter)) and not parameter.name.endswith(end)

            return is_matrix

        owner = import_module(f"{_MEGATRON}.muon")
        planter.attribute(owner, "is_matrix", make(vars(owner)["is_matrix"]))

    add(_name, "AdamW moves what Muon should", Group.STATE, _by_adam, "muon", is_of_step=True)
