"""Passes beside training's own: validation, evaluation, recomputation; rules; what goes on after a checkpoint."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import QuantSpec, quantise
from tests.proof.lies.planting import ALWAYS, Operand, Planter, When, Where

from .fault import Group, add
from .moments import other_than_declared


def _add(
    name: str, line: str, change: Any, when: When, tags: str, where: Where | None = None
) -> None:
    add(
        name,
        line,
        Group.PASS,
        lambda planter: planter.operands(change, where or Where(), when),
        tags,
    )


_VALIDATION = When(phase="validation")
_LATER = When(2, phase="validation")


def _mxfp8(o: Operand) -> Tensor | None:
    return quantise(o.x.contiguous(), "mxfp8", axis=o.axis) if o.spec.quantised else None


_add(
    "validation unquantised",
    "validation multiplies operands that are not quantised",
    other_than_declared,
    _VALIDATION,
    "validation",
)
_add("validation in mxfp8", "validation has another format", _mxfp8, _VALIDATION, "validation")
_add(
    "later validation",
    "from the second validation on operands are not quantised",
    other_than_declared,
    _LATER,
    "validation",
)
_add(
    "validation of one layer",
    "one layer is wrong in validation",
    other_than_declared,
    _VALIDATION,
    "validation",
    Where(layer=1),
)
_add(
    "evaluation unquantised",
    "`evaluate` multiplies operands that are not quantised",
    other_than_declared,
    When(phase="other"),
    "evaluate gradient",
)
_add(
    "evaluation negated k",
    "`evaluate` has k of the wrong sign",
    lambda o: -o.copy,
    When(phase="other"),
    "evaluate gradient",
    Where(slots="qk.fprop.k"),
)
_add(
    "later sample unquantised",
    "`evaluate` is right in its first micro-batch alone",
    other_than_declared,
    When(micro_batch=1),
    "evaluate",
)
_add(
    "recomputed unquantised",
    "the repeated forward pass is not quantised",
    other_than_declared,
    When(recomputed=True),
    "recomputed",
    Where(slots="*.fprop.*"),
)
_add(
    "recomputed negated",
    "the repeated forward pass has x negated",
    lambda o: -o.copy,
    When(recomputed=True),
    "recomputed",
    Where(slots="linear.fprop.x"),
)
_add(
    "first forward unquantised",
    "the forward pass that is repeated is not quantised",
    other_than_declared,
    When(recomputed=False),
    "recomputed",
    Where(slots="*.fprop.*"),
)


def _validation_maps(planter: Planter) -> None:
    """Validation begins by declaring everything to be in the working precision, and ends by restoring it."""
    from quantexp.quant.precision import unquantised
    from quantexp.training.megatron.model import scheme_modules, set_precision
    from quantexp.training.megatron.step import Stepper

    def make(original: Any) -> Any:
        def evaluate(stepper: Any, *args: Any) -> Any:
            maps = []
            for chunk in stepper.chunks:
                own = {n: m.precision for n, m in scheme_modules(chunk).items()}
                set_precision(chunk, unquantised(own), stepper.training.attention)
                maps.append((chunk, own))
            planter.fire()
            try:
                return original(stepper, *args)
            finally:
                for chunk, own in maps:
                    set_precision(chunk, own, stepper.training.attention)

        return evaluate

    planter.method(Stepper, "validation_loss", make)


add(
    "validation in bf16",
    "validation runs under a map in the working precision",
    Group.PASS,
    _validation_maps,
    "validation",
)


def _stale_validation(planter: Planter) -> None:
    """Validation multiplies weight copies of before the optimizer's step."""
    from quantexp.quant.weight_cache.weights import WeightCopies

    def make(original: Any) -> Any:
        def copied(copies: Any, precision: Any, w: Tensor, *a: Any, **k: Any) -> Tensor:
            copy: Tensor = original(copies, precision, w, *a, **k)
            if planter.place.phase != "validation":
                planter.memory[precision.module] = copy.detach().clone()
            elif precision.module in planter.memory and copy is not w:
                planter.fire()
                return planter.memory[precision.module]
            return copy

        return copied

    planter.method(WeightCopies, "for_fprop", make)


add(
    "stale weights in validation",
    "validation multiplies weights of before the step",
    Group.PASS,
    _stale_validation,
    "validation",
)


def _averaged_weights(planter: Planter) -> None:
    """Validation has other weights: their averages over the iterations so far."""
    from quantexp.training.megatron.step import Stepper

    def make(original: Any) -> Any:
        @torch.no_grad()
        def evaluate(stepper: Any, *args: Any) -> Any:
            kept = []
            for w in (w for chunk in stepper.chunks for w in chunk.parameters()):
                mean = planter.memory.setdefault(w, w.detach().float())
                mean.lerp_(w.float(), 0.1)
                kept.append((w, w.detach().clone()))
                w.copy_(mean)
            planter.fire()
            try:
                return original(stepper, *args)
            finally:
                for w, own in kept:
                    w.copy_(own)

        return evaluate

    planter.method(Stepper, "validation_loss", make)


add(
    "averaged weights in validation",
    "validation has averages of the weights",
    Group.PASS,
    _averaged_weights,
    "validation",
)

# Rules


def _rule_ignored(planter: Planter) -> None:
    """The map of the first iteration stays."""
    maps: list[Any] = []

    def make(original: Any) -> Any:
        def set_precision(model: Any, precision: Any, *more: Any) -> Any:
            if maps and maps[0].keys() == precision.keys():
                planter.fire()
                return original(model, maps[0], *more)
            maps.append(precision)
            return original(model, precision, *more)

        return set_precision

    planter.function("set_precision", make)


add(
    "rule ignored",
    "a rule that ends after iteration 2 stays in force",
    Group.PASS,
    _rule_ignored,
    "rule",
)


def _rule_in_part(planter: Planter) -> None:
    """The new map reaches layer 0 alone."""
    maps: list[Any] = []

    def make(original: Any) -> Any:
        def set_precision(model: Any, precision: Any, *more: Any) -> Any:
            if maps and maps[0].keys() == precision.keys():
                planter.fire()
                mixed = {n: m if n.layer == 0 else maps[0][n] for n, m in precision.items()}
                return original(model, mixed, *more)
            maps.append(precision)
            return original(model, precision, *more)

        return set_precision

    planter.function("set_precision", make)


add("rule in layer 0 alone", "a new rule reaches layer 0 alone", Group.PASS, _rule_in_part, "rule")
_add(
    "wrong after the rule",
    "operands are wrong once the rule has ended",
    other_than_declared,
    When(3),
    "rule",
)

# Maps that a module has, and the run has not


def _maps(name: str, line: str, change: Any, when: When = ALWAYS, tags: str = "") -> None:
    add(name, line, Group.PASS, lambda planter: planter.maps(change, when), tags)


def _reused(module: Any, slot: Any, spec: QuantSpec) -> QuantSpec | None:
    """dgrad's w and wgrad's x are the forward's copies."""
    if str(slot) not in ("linear.dgrad.w", "linear.wgrad.x") or not spec.quantised:
        return None
    return replace(spec, reuse=True, axis=slot._replace(product=type(slot.product).FPROP).axis)


def _swapped_slots(module: Any, slot: Any, spec: QuantSpec) -> QuantSpec | None:
    """The last layer has nothing quantised: a recipe's exception that the run does not declare."""
    from quantexp.quant.slots import working_spec

    return working_spec(slot) if module.layer == 1 and spec.quantised else None


_maps("reuse undeclared", "backward products multiply forward copies", _reused)
_maps("last layer in bf16", "a module's map leaves the last layer out", _swapped_slots)

# Going on


def _after_start(planter: Planter) -> None:
    planter.operands(other_than_declared)


add(
    "unquantised after going on",
    "nothing is quantised after the checkpoint",
    Group.PASS,
    _after_start,
    "resume",
)


def _history_lost(planter: Planter) -> None:
    """The histories of delayed scales do not come back."""
    from quantexp.quant.step_state import StepState

    def make(original: Any) -> Any:
        def load(state: Any, saved: Any, device: Any) -> None:
            planter.fire()
            original(state, {}, device)

        return load

    planter.method(StepState, "load_state_dict", make)


add(
    "history lost",
    "delayed scales begin anew after the checkpoint",
    Group.PASS,
    _history_lost,
    "resumed-delayed",
)


def _history_of_other_slot(planter: Planter) -> None:
    """The histories come back under each other's names."""
    from quantexp.quant.step_state import StepState

    def make(original: Any) -> Any:
        def load(state: Any, saved: Any, device: Any) -> None:
            if len(saved) > 1:
                planter.fire()
            names = list(saved)
            original(
                state,
                dict(zip(names, [saved[n] for n in names[1:] + names[:1]], strict=True)),
                device,
            )

        return load

    planter.method(StepState, "load_state_dict", make)


add(
    "histories exchanged",
    "delayed scales come back under other slots' names",
    Group.PASS,
    _history_of_other_slot,
    "resumed-delayed",
)


def _lookup(since: int) -> Any:
    """A tied embedding looks up rows that are not quantised."""

    def plant(planter: Planter) -> None:
        from quantexp.training.megatron.embedding import _Table

        def make(original: Any) -> Any:
            def forward(ctx: Any, w: Tensor, precision: Any, copies: Any) -> Tensor:
                table: Tensor = original(ctx, w, precision, copies)
                if planter.place.iteration < since:
                    return table
                planter.fire()
                return w.detach().clone()

            return forward

        planter.method(_Table, "forward", make)

    return plant


for _since, _name in ((1, ""), (2, " from iteration 2")):
    add(
        f"lookup unquantised{_name}",
        f"a tied embedding looks up rows that are not quantised{_name}",
        Group.PASS,
        _lookup(_since),
        "tied",
    )


def _lookup_noise(planter: Planter) -> None:
    """A tied embedding looks up the rows in reverse order."""
    from quantexp.training.megatron.embedding import _Table

    def make(original: Any) -> Any:
        def forward(ctx: Any, w: Tensor, precision: Any, copies: Any) -> Tensor:
            planter.fire()
            return original(ctx, w, precision, copies).flip(0)

        return forward

    planter.method(_Table, "forward", make)


add(
    "lookup reversed",
    "a tied embedding's rows are in reverse order",
    Group.PASS,
    _lookup_noise,
    "tied",
)


def _lookup_other_rows(planter: Planter) -> None:
    """The table is honest, and what is looked up is of other tokens."""
    from quantexp.training.megatron.embedding import SchemeEmbedding

    def make(original: Any) -> Any:
        def forward(module: Any, tokens: Tensor) -> Tensor:
            planter.fire()
            return original(module, tokens).roll(1, -2)

        return forward

    planter.method(SchemeEmbedding, "forward", make)


add(
    "lookup of other tokens",
    "a tied embedding returns the rows of other tokens",
    Group.PASS,
    _lookup_other_rows,
    "tied",
)


def _router_quantised(since: int) -> Any:
    """The router multiplies quantised operands, which no scheme declares."""

    def plant(planter: Planter) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        def make(original: Any) -> Any:
            def gating(router: Any, x: Tensor) -> Tensor:
                if planter.place.iteration < since:
                    return original(router, x)
                planter.fire()
                return original(router, x + (quantise(x.detach(), "mxfp8") - x.detach()))

            return gating

        owner = next(c for c in TopKRouter.__mro__ if "gating" in vars(c))
        planter.method(owner, "gating", make)

    return plant


for _since, _name in ((1, ""), (2, " from iteration 2")):
    add(
        f"router quantised{_name}",
        f"the router multiplies x in mxfp8{_name}",
        Group.PASS,
        _router_quantised(_since),
        "experts",
    )


def _router_hidden(planter: Planter) -> None:
    """The router's honest logits are replaced by those of its input in mxfp4."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    def make(original: Any) -> Any:
        def gating(router: Any, x: Tensor) -> Tensor:
            logits: Tensor = original(router, x)
            planter.fire()
            other = (
                quantise(x.detach(), "mxfp4").float().numpy()
                @ router.weight.detach().float().t().numpy()
            )
            return logits + (torch.from_numpy(other).to(logits) - logits.detach())

        return gating

    owner = next(c for c in TopKRouter.__mro__ if "gating" in vars(c))
    planter.method(owner, "gating", make)


add(
    "router hidden",
    "the router's logits are those of x in mxfp4, by numpy",
    Group.PASS,
    _router_hidden,
    "experts",
)


def _routed(change: Any, since: int = 1) -> Any:
    """The router's honest choice and weights are replaced; `change` takes both, [tokens, experts]."""

    def plant(planter: Planter) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        def make(original: Any) -> Any:
            def routing(router: Any, logits: Tensor, *more: Any, **named: Any) -> Any:
                output = original(router, logits, *more, **named)
                if planter.place.iteration < since:
                    return output
                planter.fire()
                return change(*output)

            return routing

        planter.method(TopKRouter, "routing", make)

    return plant


def _dispatched(method: str, change: Any) -> Any:
    """What the dispatcher returns is changed."""

    def plant(planter: Planter) -> None:
        from megatron.core.transformer.moe.token_dispatcher import (
            MoEAllGatherTokenDispatcher,
            MoEAlltoAllTokenDispatcher,
        )

        def make(original: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                planter.fire()
                return change(original(*args, **kwargs))

            return run

        for owner in (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher):
            planter.method(owner, method, make)

    return plant


def _halved(y: Tensor) -> Tensor:
    return y * 0.5


for _name, _line, _plant in (
    (
        "experts of a neighbour",
        "each token goes to the experts of its neighbour",
        _routed(lambda probs, chosen: (probs.roll(1, 0), chosen.roll(1, 0))),
    ),
    (
        "experts of a neighbour from 2",
        "the same from iteration 2 on",
        _routed(lambda probs, chosen: (probs.roll(1, 0), chosen.roll(1, 0)), since=2),
    ),
    (
        "weights of experts in fp8",
        "the weights of the experts are rounded to E4M3",
        _routed(lambda probs, chosen: (probs.to(torch.float8_e4m3fn).to(probs.dtype), chosen)),
    ),
    (
        "weights of experts alike",
        "all chosen experts have the same weight",
        _routed(lambda probs, chosen: (chosen * probs.sum(-1, keepdim=True) / 2, chosen)),
    ),
    (
        "rows for experts rounded",
        "rows are rounded to E4M3 on their way to the experts",
        _dispatched(
            "dispatch_postprocess",
            lambda sent: (sent[0].to(torch.float8_e4m3fn).to(sent[0].dtype), *sent[1:]),
        ),
    ),
    (
        "rows for experts exchanged",
        "each expert gets its rows in the place of their neighbours",
        _dispatched("dispatch_postprocess", lambda sent: (sent[0].roll(1, 0), *sent[1:])),
    ),
    (
        "weights sent exchanged",
        "the weights of an expert's rows are those of their neighbours",
        _dispatched("dispatch_postprocess", lambda sent: (*sent[:2], sent[2].roll(1, 0))),
    ),
    (
        "experts added in part",
        "half of what the experts return is added",
        _dispatched("combine_preprocess", _halved),
    ),
):
    add(_name, _line, Group.PASS, _plant, "experts")


def _map_resolved(change: Callable[[Any, QuantSpec, Any], QuantSpec | None], since: int = 1) -> Any:
    """The configuration declares something, and the map that the trainer asks for has something else."""

    def plant(planter: Planter) -> None:
        from quantexp.quant.precision import ModulePrecision

        def make(original: Any) -> Any:
            def precision_map(model: Any, quant: Any, iteration: int = 1) -> Any:
                declared = original(model, quant, iteration)
                if iteration < since:
                    return declared
                changed = {}
                for name, module in declared.items():
                    slots = dict(module.slots)
                    for slot, spec in slots.items():
                        other = change(slot, spec, name)
                        if other is not None and (other != spec or other.stream != spec.stream):
                            planter.fire()
                            slots[slot] = other
                    changed[name] = ModulePrecision(name, slots)
                return changed

            return precision_map

        planter.function("precision_map", make)

    return plant


def _without_wgrad(slot: Any, spec: QuantSpec, _: Any) -> QuantSpec | None:
    from quantexp.quant.slots import working_spec

    return working_spec(slot) if slot.product.value == "wgrad" and spec.quantised else None


def _other_block(slot: Any, spec: QuantSpec, _: Any) -> QuantSpec | None:
    return replace(spec, block=2 * spec.block) if spec.block > 1 else None


def _without_last_layer(slot: Any, spec: QuantSpec, name: Any) -> QuantSpec | None:
    from quantexp.quant.slots import working_spec

    return working_spec(slot) if name.layer == 1 and spec.quantised else None


def _other_stream(slot: Any, spec: QuantSpec, _: Any) -> QuantSpec | None:
    return replace(spec, stream=f"layer 0 {slot}") if spec.stream else None


def _of_high(slot: Any, spec: QuantSpec, _: Any) -> QuantSpec | None:
    return None if spec.of is None else replace(spec, of=None)


add(
    "of high in the map",
    "the map quantises high precision in place of copies",
    Group.PASS,
    _map_resolved(_of_high),
    "of-forward of-stored",
)
for _name, _line, _plant in (
    (
        "map resolved wrongly",
        "the map of the run lacks what its configuration declares for wgrad",
        _map_resolved(_without_wgrad),
    ),
    (
        "map with other blocks",
        "the map of the run has blocks twice as long as configured",
        _map_resolved(_other_block),
    ),
    (
        "map without the last layer",
        "the map of the run leaves the last layer out",
        _map_resolved(_without_last_layer),
    ),
    (
        "map with other streams",
        "in the map of the run all modules share their random numbers and amax histories",
        _map_resolved(_other_stream),
    ),
):
    add(_name, _line, Group.PASS, _plant)
add(
    "rule resolved wrongly",
    "the map after a rule has ended lacks wgrad's formats",
    Group.PASS,
    _map_resolved(_without_wgrad, since=3),
    "rule",
)


def _extra_product(since: int, *, is_hidden: bool) -> Any:
    """A product beside those of the map: an adapter that somebody left in each layer."""

    def plant(planter: Planter) -> None:
        from megatron.core.transformer.transformer_layer import TransformerLayer

        def make(original: Any) -> Any:
            def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
                output = original(layer, *args, **kwargs)
                x = output[0]
                if planter.place.iteration < since:
                    return output
                planter.fire()
                down = torch.full((x.shape[-1], 4), 0.01, dtype=x.dtype)
                if is_hidden:
                    y = torch.from_numpy(x.detach().float().numpy() @ down.float().numpy()).to(x)
                else:
                    y = torch.matmul(x, down)
                return (x + y.sum(-1, keepdim=True) * 0.1, *output[1:])

            return forward

        planter.method(TransformerLayer, "forward", make)

    return plant


add(
    "extra product",
    "each layer has a product that the map does not list",
    Group.PASS,
    _extra_product(1, is_hidden=False),
)
add(
    "extra product from 2",
    "the same from iteration 2 on",
    Group.PASS,
    _extra_product(2, is_hidden=False),
)
add(
    "extra product by numpy",
    "the same by numpy, between the modules of the map",
    Group.PASS,
    _extra_product(1, is_hidden=True),
)


def _between(owner: str, function: str, change: Any, since: int = 1) -> Any:
    """What lies between the modules is changed: the result of a method of Megatron-Core's."""

    def plant(planter: Planter) -> None:
        module, name = owner.rsplit(".", 1)
        cls = getattr(importlib.import_module(module), name)

        def make(original: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                output = original(*args, **kwargs)
                if planter.place.iteration < since:
                    return output
                planter.fire()
                return change(output)

            return run

        planter.method(cls, function, make)

    return plant


def _gradient_changed(y: Tensor) -> Tensor:
    """From here the gradient flows back in E5M2."""
    if y.requires_grad:
        y.register_hook(lambda g: g.to(torch.float8_e5m2).to(g.dtype))
    return y


def _first_changed(change: Any) -> Any:
    return lambda output: (change(output[0]), *output[1:])


def _in_fp8(y: Tensor) -> Tensor:
    return y.to(torch.float8_e4m3fn).to(y.dtype)


_LAYERS = "megatron.core.transformer"
_OUTSIDE = "megatron.core.models.common"
for _name, _line, _plant in (
    (
        "branch kept small",
        "what attention adds to the residual stream is 0.9 of it",
        _between(
            f"{_LAYERS}.attention.Attention",
            "forward",
            _first_changed(lambda y: y * 0.9),
        ),
    ),
    (
        "stream in fp8",
        "the residual stream is rounded to E4M3 between the layers",
        _between(
            f"{_LAYERS}.transformer_layer.TransformerLayer",
            "forward",
            _first_changed(lambda y: y.to(torch.float8_e4m3fn).to(y.dtype)),
        ),
    ),
    (
        "norm in fp8 from 2",
        "from iteration 2 on what leaves the norms is rounded to E4M3",
        _between(
            "torch.nn.RMSNorm",
            "forward",
            lambda y: y.to(torch.float8_e4m3fn).to(y.dtype),
            since=2,
        ),
    ),
    (
        "gradient of norms in fp8",
        "the gradients that enter the norms are rounded to E5M2",
        _between("torch.nn.RMSNorm", "forward", _gradient_changed),
    ),
    (
        "gradient of the stream in fp8",
        "the residual stream's gradient is rounded to E5M2 between the layers",
        _between(
            f"{_LAYERS}.transformer_layer.TransformerLayer",
            "forward",
            _first_changed(_gradient_changed),
        ),
    ),
    (
        "stream behind a layer in fp8 from 2",
        "from iteration 2 on what left a layer is rounded to E4M3 before it enters the next one",
        _between(
            f"{_LAYERS}.transformer_layer.TransformerLayer",
            "__call__",
            _first_changed(_in_fp8),
            since=2,
        ),
    ),
    (
        "gradient of the stream in fp8 from 3",
        "from iteration 3 on the residual stream's gradient is rounded to E5M2 between the layers",
        _between(
            f"{_LAYERS}.transformer_layer.TransformerLayer",
            "forward",
            _first_changed(_gradient_changed),
            since=3,
        ),
    ),
    (
        "values exchanged",
        "attention gets the value heads of the neighbouring token",
        _between(
            f"{_LAYERS}.attention.SelfAttention",
            "get_query_key_value_tensors",
            lambda qkv: (qkv[0], qkv[1], qkv[2].roll(1, 0), *qkv[3:]),
        ),
    ),
    (
        "embedding in fp8",
        "what leaves the embedding is rounded to E4M3",
        _between(
            f"{_OUTSIDE}.embeddings.language_model_embedding.LanguageModelEmbedding",
            "forward",
            _in_fp8,
        ),
    ),
    (
        "embedding of other tokens from 2",
        "from iteration 2 on the embedding returns the rows of the token before",
        _between(
            f"{_OUTSIDE}.embeddings.language_model_embedding.LanguageModelEmbedding",
            "forward",
            lambda y: y.roll(1, 0),
            since=2,
        ),
    ),
    (
        "last norm in fp8",
        "what the decoder returns is rounded to E4M3",
        _between(f"{_LAYERS}.transformer_block.TransformerBlock", "forward", _in_fp8),
    ),
    (
        "logits in fp8",
        "the logits are rounded to E4M3",
        _between(
            "megatron.core.tensor_parallel.layers.ColumnParallelLinear",
            "forward",
            _first_changed(
                lambda y: y + (_in_fp8(y.detach()) - y.detach()) if y.shape[-1] > 100 else y
            ),
        ),
    ),
    (
        "loss smaller",
        "the loss of each token is 0.9 of it",
        _between(
            f"{_OUTSIDE}.language_module.language_module.LanguageModule",
            "compute_language_model_loss",
            lambda y: y * 0.9,
        ),
    ),
    (
        "gradient of the loss in fp8",
        "the gradient of the logits is rounded to E5M2",
        _between(
            "megatron.core.tensor_parallel.layers.ColumnParallelLinear",
            "forward",
            _first_changed(lambda y: _gradient_changed(y) if y.shape[-1] > 100 else y),
        ),
    ),
    (
        "queries exchanged",
        "attention gets the queries of the neighbouring token",
        _between(
            f"{_LAYERS}.attention.SelfAttention",
            "get_query_key_value_tensors",
            lambda qkv: (qkv[0].roll(1, 0), *qkv[1:]),
        ),
    ),
):
    add(_name, _line, Group.PASS, _plant)


def _angles(change: Any, since: int = 1) -> Any:
    """The table of rotary angles is another; `change` takes the embedding and its arguments."""

    def plant(planter: Planter) -> None:
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        def make(original: Any) -> Any:
            def get_emb(embedding: Any, *args: Any, **kwargs: Any) -> Any:
                angles = original(embedding, *args, **kwargs)
                planter.fire()
                if isinstance(angles, tuple):  # YaRN's, with the factor of cosine and sine
                    return (change(angles[0]), angles[1])
                return change(angles)

            # Megatron-Core 0.15 caches the whole forward.
            get_emb.cache_clear = getattr(original, "cache_clear", None)  # type: ignore[attr-defined]
            return get_emb

        from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
            YarnRotaryEmbedding,
        )

        for owner in (RotaryEmbedding, YarnRotaryEmbedding):
            planter.method(owner, "get_emb" if hasattr(owner, "get_emb") else "forward", make)

    return plant


for _name, _line, _plant in (
    (
        "angles one early",
        "the rotary angles are those of the token before",
        _angles(lambda angles: angles.roll(1, 0)),
    ),
    (
        "another rotary base",
        "the rotary angles are those of a base that is 1% larger",
        _angles(lambda angles: angles * 0.99),
    ),
    (
        "angles in bf16",
        "the rotary angles are rounded to bf16",
        _angles(lambda angles: angles.to(torch.bfloat16).to(angles.dtype)),
    ),
    (
        "no angles",
        "nothing is rotated",
        _angles(torch.zeros_like),
    ),
):
    add(_name, _line, Group.PASS, _plant)


def _other_labels(planter: Planter) -> None:
    """The loss is that of the token after the next one."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    def make(original: Any) -> Any:
        def compute(module: Any, labels: Tensor, logits: Tensor) -> Tensor:
            planter.fire()
            return original(module, labels.roll(-1, 1), logits)

        return compute

    planter.method(LanguageModule, "compute_language_model_loss", make)


add("other labels", "the loss has the labels of the next token", Group.PASS, _other_labels)


def _key_not_rotated(planter: Planter) -> None:
    """Latent attention's rotated part is rotated back."""
    from megatron.core.transformer import multi_latent_attention

    def make(original: Any) -> Any:
        def apply(t: Tensor, angles: Tensor, *more: Any, **named: Any) -> Tensor:
            planter.fire()
            return original(t, -angles, *more, **named)

        return apply

    planter.attribute(
        multi_latent_attention,
        "apply_rotary_pos_emb",
        make(multi_latent_attention.apply_rotary_pos_emb),
    )


add(
    "latent rotated back",
    "the rotated parts of latent attention are rotated the other way",
    Group.PASS,
    _key_not_rotated,
    "latent",
)


def _norm_left_out(planter: Planter) -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    def make(original: Any) -> Any:
        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            planter.fire()
            norm = layer._modules["input_layernorm"]
            layer._modules["input_layernorm"] = torch.nn.Identity()
            try:
                return original(layer, *args, **kwargs)
            finally:
                layer._modules["input_layernorm"] = norm

        return forward

    planter.method(TransformerLayer, "forward", make)


add("norm left out", "the norm before attention is never called", Group.PASS, _norm_left_out)
