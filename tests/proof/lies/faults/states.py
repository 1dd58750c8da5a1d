"""Random numbers, transforms and delayed scales that are not those of the run's seed, iteration and history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import QuantSpec, Rounding, Transform, estimator, finite_amax
from tests.proof.lies.planting import Planter, When

from .fault import Group, add


def _draws(
    change: Callable[[Any, QuantSpec, dict[str, int]], dict[str, int]],
) -> Callable[[Planter], None]:
    """Change the seed and offset of random numbers."""

    def plant(planter: Planter) -> None:
        from quantexp.quant.step_state import StepState

        def make(original: Any) -> Any:
            def draw(state: Any, spec: QuantSpec) -> dict[str, int]:
                numbers: dict[str, int] = original(state, spec)
                if not numbers:
                    return numbers
                other = change(planter, spec, numbers)
                if other != numbers:
                    planter.fire()
                return other

            return draw

        planter.method(StepState, "draw", make)

    return plant


def _seed_of_layer_0(planter: Planter, spec: QuantSpec, numbers: dict[str, int]) -> dict[str, int]:
    from quantexp.quant.step_state import seed_of

    words = spec.stream.split(" ")
    if words[0] == "layer":
        words[1] = "0"
    return {**numbers, "seed": seed_of(1, " ".join(words))}


def _seed_of_operand(planter: Planter, spec: QuantSpec, numbers: dict[str, int]) -> dict[str, int]:
    """Both operands of a product, or the same operand of two, have the same numbers."""
    from quantexp.quant.step_state import seed_of

    return {**numbers, "seed": seed_of(1, spec.stream.rpartition(".")[0])}


_DRAWN = "drawn python"
add(
    "seed 0",
    "every random number has seed 0",
    Group.STATE,
    _draws(lambda p, s, d: {**d, "seed": 0}),
    _DRAWN,
)
add(
    "seed of another run",
    "random numbers of training.seed + 1",
    Group.STATE,
    _draws(lambda p, s, d: {**d, "seed": d["seed"] ^ 1}),
    _DRAWN,
)
add(
    "one seed for all layers",
    "layers draw the same numbers",
    Group.STATE,
    _draws(_seed_of_layer_0),
    _DRAWN,
)
add(
    "one seed for both operands",
    "both operands of a product draw the same numbers",
    Group.STATE,
    _draws(_seed_of_operand),
    _DRAWN,
)
add(
    "offset without iteration",
    "every iteration draws the numbers of the first",
    Group.STATE,
    _draws(lambda p, s, d: {**d, "offset": (1 << 32) + (d["offset"] & 0xFFFFFFFF)}),
    _DRAWN,
)
add(
    "offset without micro-batch",
    "every micro-batch draws the numbers of the first",
    Group.STATE,
    _draws(lambda p, s, d: {**d, "offset": d["offset"] >> 32 << 32}),
    _DRAWN,
)
add(
    "offset one ahead",
    "numbers of the next iteration",
    Group.STATE,
    _draws(lambda p, s, d: {**d, "offset": d["offset"] + (1 << 32)}),
    _DRAWN,
)
add(
    "seed 0 from iteration 3",
    "seed 0 from iteration 3 on",
    Group.STATE,
    _draws(lambda p, s, d: {**d, "seed": 0} if p.place.iteration >= 3 else d),
    _DRAWN,
)


def _signs(change: Callable[[Planter, QuantSpec, Tensor], Tensor]) -> Callable[[Planter], None]:
    """Change the signs of a random transform."""

    def plant(planter: Planter) -> None:
        from quantexp.quant.step_state import StepState

        def make(original: Any) -> Any:
            def signs(state: Any, spec: QuantSpec, device: Any) -> Tensor | None:
                own: Tensor | None = original(state, spec, device)
                if own is None:
                    return None
                other = change(planter, spec, own)
                if not torch.equal(other, own):
                    planter.fire()
                return other

            return signs

        planter.method(StepState, "signs", make)

    return plant


def _of_previous_iteration(planter: Planter, spec: QuantSpec, own: Tensor) -> Tensor:
    """The signs of this product and micro-batch in the previous iteration."""
    product = spec.stream.rpartition(".")[0]
    place = planter.place
    memory = planter.memory.setdefault(("signs", product, place.micro_batch), {})
    memory[place.iteration] = own
    return memory.get(place.iteration - 1, own)


def _of_first(planter: Planter, spec: QuantSpec, own: Tensor) -> Tensor:
    """The signs of the first iteration, which both operands share: the product is right."""
    product = spec.stream.rpartition(".")[0]
    key = ("first signs", product, planter.place.micro_batch)
    return planter.memory.setdefault(key, own)


add(
    "signs of the previous iteration",
    "both operands have the signs of the iteration before",
    Group.STATE,
    _signs(_of_previous_iteration),
    "drawn",
)
add(
    "signs of iteration 1",
    "both operands keep the signs of iteration 1",
    Group.STATE,
    _signs(_of_first),
    "drawn",
)
add(
    "signs all plus",
    "both operands have no signs",
    Group.STATE,
    _signs(lambda p, s, own: own.abs()),
    "drawn",
)
add(
    "signs of one operand",
    "the operands of a product have unlike signs",
    Group.STATE,
    _signs(lambda p, s, own: own.roll(1) if s.left else own),
    "drawn",
)


def _without_transform(planter: Planter) -> None:
    """No operand is transformed; the product is right."""

    def make(original: Any) -> Any:
        def transform_of(spec: QuantSpec, device: torch.device) -> Transform | None:
            if spec.is_transformed:
                planter.fire()
                return None
            transform: Transform | None = original(spec, device)
            return transform

        return transform_of

    planter.function("transform_of", make)


add("no transform", "no operand has its Hadamard transform", Group.STATE, _without_transform)


def _half_transform(planter: Planter) -> None:
    """Transforms in blocks of half the length."""

    def make(original: Any) -> Any:
        def transform_of(spec: QuantSpec, device: torch.device) -> Transform | None:
            if spec.is_transformed and spec.hadamard.value == "deterministic":
                planter.fire()
                spec = replace(spec, hadamard_block=spec.hadamard_block // 2)
            transform: Transform | None = original(spec, device)
            return transform

        return transform_of

    planter.function("transform_of", make)


add("half transform", "transforms in blocks of half the length", Group.STATE, _half_transform)


def _to_nearest(planter: Planter) -> None:
    planter.quantisers(
        lambda call: call.again(spec=replace(call.spec, rounding=Rounding.EVEN)),
        spec=lambda spec: spec.rounding is Rounding.STOCHASTIC,
    )


add(
    "nearest for stochastic", "stochastic rounding is to nearest", Group.STATE, _to_nearest, "drawn"
)

# Delayed scales


def _history(method: str, make: Callable[[Planter, Any], Any]) -> Callable[[Planter], None]:
    def plant(planter: Planter) -> None:
        from quantexp.formats import AmaxHistory

        planter.method(AmaxHistory, method, lambda original: make(planter, original))

    return plant


def _never(planter: Planter, original: Any) -> Any:
    def advance(history: Any, keep: bool = True) -> None:
        if history._steps and keep and history._running is not None:
            planter.fire()
            original(history, False)
        else:
            original(history, keep)

    return advance


def _last_only(planter: Planter, original: Any) -> Any:
    def amax_for(history: Any, x: Tensor) -> Tensor:
        own = original(history, x)
        other = history._steps[-1] if history._steps else own
        if not torch.equal(own, other):
            planter.fire()
        return other

    return amax_for


def _current(planter: Planter, original: Any) -> Any:
    def amax_for(history: Any, x: Tensor) -> Tensor:
        planter.fire()
        return finite_amax(x)

    return amax_for


def _partly(planter: Planter, original: Any) -> Any:
    def observe(history: Any, x: Tensor) -> None:
        planter.fire()
        original(history, x.flatten()[:8])

    return observe


def _once(planter: Planter, original: Any) -> Any:
    """The last micro-batch enters alone."""

    def include(history: Any, amax: Tensor) -> None:
        planter.fire()
        history._running = amax

    return include


_DELAYED = "delayed"
add(
    "history not advanced",
    "the history keeps the amax of iteration 1 alone",
    Group.STATE,
    _history("advance", _never),
    _DELAYED,
)
add(
    "history of one step",
    "scales follow from the last iteration alone",
    Group.STATE,
    _history("amax_for", _last_only),
    _DELAYED,
)
add(
    "current for delayed",
    "scales follow from the tensor's own amax",
    Group.STATE,
    _history("amax_for", _current),
    _DELAYED,
)
add(
    "history of 8 elements",
    "8 elements of each tensor enter the history",
    Group.STATE,
    _history("observe", _partly),
    _DELAYED,
)
add(
    "history of the last micro-batch",
    "the last micro-batch alone enters the history",
    Group.STATE,
    _history("include", _once),
    _DELAYED,
)


def _validation_enters(planter: Planter) -> None:
    """A history that an operand enters twice as large."""
    from quantexp.formats import AmaxHistory

    def make(original: Any) -> Any:
        def advance(history: Any, keep: bool = True) -> None:
            if history._running is not None and planter.place.iteration >= 2:
                planter.fire()
                history._running = history._running * 2
            original(history, keep)

        return advance

    planter.method(AmaxHistory, "advance", make)


add(
    "history doubled",
    "amaxes of iteration 2 and later enter the history twice as large",
    Group.STATE,
    _validation_enters,
    _DELAYED,
)


def _read_half(planter: Planter) -> None:
    """The amax that a history gives to whoever asks is half of what it is."""
    from quantexp.formats import AmaxHistory

    original = AmaxHistory.__dict__["amax"]

    def amax(history: Any) -> Tensor | None:
        own: Tensor | None = original.fget(history)
        if own is not None:
            planter.fire()
        return None if own is None else own / 2

    planter.attribute(AmaxHistory, "amax", property(amax))


add(
    "history read as half",
    "a history gives half its amax, to the quantiser and to whoever else asks",
    Group.STATE,
    _read_half,
    _DELAYED,
)


def _clip_ignored(planter: Planter) -> None:
    """Gradients of saturated elements pass."""

    def make(original: Any) -> Any:
        def clipped(gradient: Tensor, x: Tensor, spec: QuantSpec, *rest: Any) -> Tensor:
            result: Tensor = original(gradient, x, spec, *rest)
            is_changed = spec.clip_gradient or spec.dge is not None
            if is_changed and not torch.equal(result, gradient):
                planter.fire()
            return gradient

        return clipped

    planter.function("clipped", make)


add("clip ignored", "clip_gradient or dge has no effect", Group.STATE, _clip_ignored, "clip")


def _another_power(planter: Planter) -> None:
    """The estimator has another power."""

    def make(original: Any) -> Any:
        def factors(x: Tensor, spec: QuantSpec, power: float, *rest: Any) -> Tensor:
            planter.fire()
            result: Tensor = original(x, spec, power + 1, *rest)
            return result

        return factors

    planter.function("dge_factors", make)


def _another_cap(planter: Planter) -> None:
    """The arithmetic of the estimator itself is wrong, not its caller."""
    planter.attribute(estimator, "MOST", 30.0)
    planter.fire()


add("another cap", "dge has another largest factor", Group.STATE, _another_cap, "estimator")
add("another power", "the power of dge is another", Group.STATE, _another_power, "estimator")


def _clip_all(planter: Planter) -> None:
    """Gradients of the larger elements do not pass, whatever is declared."""
    from quantexp.training.megatron.linear import _Linear

    def make(original: Any) -> Any:
        def backward(ctx: Any, *grads: Tensor) -> Any:
            own_x = (
                ctx.saved_tensors[0] if ctx.saved_tensors[0] is not None else ctx.saved_tensors[1]
            )
            dx, *rest = original(ctx, *grads)
            if dx is None or own_x is None or dx.shape != own_x.shape or dx.numel() == 0:
                return (dx, *rest)
            planter.fire()
            return (dx.masked_fill(own_x.abs() > own_x.abs().amax() / 2, 0.0), *rest)

        return backward

    planter.method(_Linear, "backward", make)


add(
    "clip undeclared",
    "dx is zero where x is large, though nothing declares it",
    Group.STATE,
    _clip_all,
)
_ = When


# What enters the residual stream starts as wide as everything else.
def _without_depth(planter: Planter) -> None:
    from importlib import import_module

    def make(original: Any) -> Any:
        def axis_of(name: str) -> int | None:
            planter.fire()
            return None if original(name) == 1 else original(name)

        return axis_of

    owner = import_module("quantexp.training.megatron.initial_weights")
    planter.attribute(owner, "axis_of", make(vars(owner)["axis_of"]))


add("initial weights too wide", "proj and fc2 start too wide", Group.STATE, _without_depth)


# Which rows of a parameter a rank begins with.
def _rolled_rows(planter: Planter) -> None:
    from importlib import import_module

    def make(original: Any) -> Any:
        def copy_part(whole: Any, shard: Any, to: Any) -> None:
            if shard.axis == 0 and shard.ranges[0][0] > 0:
                planter.fire()
                whole = whole.roll(1, 0)
            original(whole, shard, to)

        return copy_part

    owner = import_module("quantexp.training.megatron.initial_weights")
    planter.attribute(owner, "_copy_part", make(vars(owner)["_copy_part"]))


add("rank 1 begins with other rows", "rank 1's rows are one row early", Group.LAYOUT, _rolled_rows)
