"""Faults of a moment (an iteration, a micro-batch), of a place (a layer, a module), and of memory (stale operands)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantexp.quant.sites import Operand as Name
from tests.proof.lies.planting import ALWAYS, EVERYWHERE, Operand, Planter, When, Where

from .fault import Group, add

_Change = Callable[[Operand], Tensor | None]


def other_than_declared(o: Operand) -> Tensor:
    """The source where a format is declared, and mxfp8 where none is: a label and a tensor that disagree."""
    if o.spec.quantised:
        return o.x.clone()
    from quantexp.formats import quantise

    return quantise(o.x.contiguous(), "mxfp8", axis=o.axis)


def _add(
    name: str,
    line: str,
    change: _Change,
    where: Where = EVERYWHERE,
    when: When = ALWAYS,
    tags: str = "",
) -> None:
    add(name, line, Group.MOMENT, lambda planter: planter.operands(change, where, when), tags)


def _zero(o: Operand) -> Tensor:
    return torch.zeros_like(o.copy)


# Moments

_add("iteration 1 only", "quantised in iteration 1 only", other_than_declared, when=When(since=2))
_add("from iteration 3", "wrong from iteration 3 on", other_than_declared, when=When(since=3))
_add(
    "iteration 2 alone",
    "wrong in iteration 2 and in no other",
    other_than_declared,
    when=When(2, 2),
)
_add("odd iterations", "wrong in odd iterations", other_than_declared, when=When(every=2))
_add("even iterations", "wrong in even iterations", other_than_declared, when=When(2, every=2))
_add("unwatched", "wrong while nobody watches", other_than_declared, when=When(watched=False))
add(
    "watched",
    "wrong while somebody watches",
    Group.MOMENT,
    lambda planter: planter.operands(other_than_declared, when=When(watched=True)),
    needs_watch=True,
)
_add("micro-batch 0", "wrong in micro-batch 0", other_than_declared, when=When(micro_batch=0))
_add(
    "micro-batch 1", "wrong in the last micro-batch", other_than_declared, when=When(micro_batch=1)
)
_add(
    "micro-batch 1 zero", "all operands of micro-batch 1 are zero", _zero, when=When(micro_batch=1)
)
_add(
    "micro-batch 1 from iteration 3",
    "wrong in the last micro-batch from iteration 3 on",
    other_than_declared,
    when=When(3, micro_batch=1),
)
_add("gradients zero", "g is zero in both backward products", _zero, Where(slots="linear.*.g"))
_add(
    "gradients zero from iteration 2",
    "g is zero from iteration 2 on",
    _zero,
    Where(slots="linear.*.g"),
    When(2),
)
_add(
    "gradients zero in micro-batch 1",
    "g is zero in the last micro-batch",
    _zero,
    Where(slots="linear.*.g"),
    When(micro_batch=1),
)

# Places

_add("layer 0", "wrong in layer 0", other_than_declared, Where(layer=0))
_add("last layer", "wrong in the last layer", other_than_declared, Where(layer=1))
_add("fc2 alone", "wrong in fc2", other_than_declared, Where("*fc2"))
_add("proj of layer 1", "wrong in one module", other_than_declared, Where("proj", layer=1))
_add(
    "proj of layer 1 from iteration 3",
    "wrong in one product of one module from iteration 3 on",
    other_than_declared,
    Where("proj", "linear.wgrad.*", 1),
    When(3),
)
_add(
    "attention of layer 1",
    "wrong in the attention of one layer",
    other_than_declared,
    Where("attention", layer=1),
)
_add("expert 0", "wrong in one expert", other_than_declared, Where("expert0-*"), tags="experts")
_add(
    "last expert",
    "wrong in the last expert's fc2",
    other_than_declared,
    Where("expert3-fc2"),
    tags="experts",
)
_add(
    "shared experts",
    "wrong in the shared experts",
    other_than_declared,
    Where("shared*"),
    tags="latent",
)
_add(
    "latent projections",
    "wrong in the projections of latent attention",
    other_than_declared,
    Where("kv*"),
    tags="latent",
)
_add(
    "output layer",
    "wrong in the output layer",
    other_than_declared,
    Where("output*"),
    tags="output",
)
_add(
    "output layer's dw",
    "wrong in the output layer's wgrad",
    other_than_declared,
    Where("output*", "*.wgrad.*"),
    tags="output",
)

# Memory


def _previous_call(o: Operand) -> Tensor | None:
    """The first half of the rows from the previous call of this product."""
    before = o.last()
    if before is None or before.shape[0] < 2:
        return None
    half = before.shape[0] // 2
    return torch.cat([before[:half], o.copy[half:]])


def _first(o: Operand) -> Tensor | None:
    """The copy of the first iteration."""
    key = ("first", o.module, o.slot)
    first = o.planter.memory.get(key)
    if first is None:
        o.planter.memory[key] = o.copy.detach().clone()
        return None
    if o.planter.place.iteration == 1 or first.shape != o.copy.shape:
        return None
    return first


def _of_previous_step(o: Operand) -> Tensor | None:
    """The weight as it was before the last optimizer step."""
    key, iteration = ("step", o.module, o.slot), o.planter.place.iteration
    memory = o.planter.memory.setdefault(key, {})
    memory.setdefault(iteration, o.copy.detach().clone())
    before = memory.get(iteration - 1)
    return None if before is None or before.shape != o.copy.shape else before


def _other_module(o: Operand) -> Tensor | None:
    """The last copy of this shape that another module multiplied."""
    key = ("module", o.slot, tuple(o.copy.shape))
    name, before = o.planter.memory.get(key, (None, None))
    o.planter.memory[key] = (o.module, o.copy.detach().clone())
    return before if before is not None and name != o.module else None


def _of_other_micro_batch(o: Operand) -> Tensor | None:
    """The operand of the previous micro-batch of this iteration, or of the last one."""
    return o.last(by="micro-batch")


def _of_fprop(slots: str, o: Operand) -> Tensor | None:
    """The forward product's copy in a backward product, whose blocks run along the other axis."""
    key = ("fprop", o.module, o.slot.operand)
    if o.slot.product.value == "fprop":
        o.planter.memory[key] = o.copy.detach().clone()
        return None
    before = o.planter.memory.get(key)
    fits = before is not None and before.shape == o.copy.shape
    return before if fits else None


_add("previous call", "half of the rows are those of the previous call", _previous_call)
_add("stale weights", "weights of iteration 1", _first, Where(slots="*.w"))
_add("stale dgrad weights", "dgrad's weights of iteration 1", _first, Where(slots="*.dgrad.w"))
_add(
    "weights of the step before",
    "weights before the optimizer's step",
    _of_previous_step,
    Where(slots="*.w"),
)
_add(
    "weights of two layers swapped",
    "a layer multiplies the other's weight",
    _other_module,
    Where(slots="*.w"),
)
_add(
    "x of another micro-batch",
    "wgrad takes x of another micro-batch",
    _of_other_micro_batch,
    Where(slots="linear.wgrad.x"),
)
_add(
    "g of another micro-batch",
    "wgrad takes g of another micro-batch",
    _of_other_micro_batch,
    Where(slots="linear.wgrad.g"),
)
_add(
    "stale P",
    "dv takes P of another micro-batch",
    _of_other_micro_batch,
    Where(slots="pv.dgrad_v.P"),
)
_add(
    "stale dS",
    "dk takes dS of another micro-batch",
    _of_other_micro_batch,
    Where(slots="qk.dgrad_k.dS"),
)
_add(
    "stale k",
    "scores take k of another micro-batch",
    _of_other_micro_batch,
    Where(slots="qk.fprop.k"),
)
_add(
    "forward copy of the weight",
    "dgrad multiplies fprop's copy",
    lambda o: _of_fprop("w", o),
    Where(slots="linear.*.w"),
)
_add(
    "forward copy of x",
    "wgrad multiplies fprop's copy",
    lambda o: _of_fprop("x", o),
    Where(slots="linear.fprop.x linear.wgrad.x"),
)
_add("q for k", "scores take q in the place of k", lambda o: _swapped(o), Where(slots="qk.fprop.*"))


def _swapped(o: Operand) -> Tensor | None:
    """q with q, for the key heads that there are."""
    if o.slot.operand is Name.Q:
        o.planter.memory["q"] = o.copy.detach().clone()
        return None
    q = o.planter.memory.get("q")
    if q is None or q.dim() != 4 or q.shape[:2] != o.copy.shape[:2]:
        return None
    return q[:, :, : o.copy.shape[2], : o.copy.shape[3]].contiguous()


def _shifted_heads(o: Operand) -> Tensor:
    """The heads of another group."""
    return o.copy.roll(1, 2)


_add(
    "heads of another group",
    "v's heads are those of the next group",
    _shifted_heads,
    Where(slots="pv.fprop.v"),
)
_add(
    "keys one early",
    "k is shifted by a token",
    lambda o: o.copy.roll(1, 0),
    Where(slots="qk.fprop.k"),
)


def _cache_across_steps(planter: Planter) -> None:
    """The weight cache forgets that a step ended."""
    from quantexp.quant.weight_cache.weights import WeightCopies

    def make(original: Any) -> Any:
        def copied(copies: Any, precision: Any, w: Tensor, *a: Any, **k: Any) -> Tensor:
            copy = original(copies, precision, w, *a, **k)
            key = (id(copies), precision.module)
            kept = planter.memory.setdefault(key, copy.detach().clone())
            if planter.place.iteration > 1 and kept.shape == copy.shape and copy is not w:
                planter.fire()
                return kept
            return copy

        return copied

    planter.method(WeightCopies, "for_fprop", make)


add(
    "cache across steps",
    "the weight cache returns fprop's copies of iteration 1",
    Group.MOMENT,
    _cache_across_steps,
)


def _cache_by_shape(planter: Planter) -> None:
    """The weight cache's key has the shape and not the module."""
    from quantexp.quant.weight_cache.weights import WeightCopies

    def make(original: Any) -> Any:
        def copied(copies: Any, precision: Any, w: Tensor, *a: Any, **k: Any) -> Tensor:
            copy = original(copies, precision, w, *a, **k)
            place = planter.place
            key = (place.iteration, place.micro_batch, tuple(w.shape))
            kept = planter.memory.setdefault(key, copy.detach().clone())
            if copy is not w and not torch.equal(kept, copy):
                planter.fire()
                return kept
            return copy

        return copied

    planter.method(WeightCopies, "for_fprop", make)


add(
    "cache by shape",
    "the weight cache confuses weights of one shape",
    Group.MOMENT,
    _cache_by_shape,
)


def _changed_after_quantising(planter: Planter) -> None:
    """A kept copy is overwritten by a later borrower of its memory, in part."""
    from quantexp.quant.weight_cache.weights import WeightCopies

    def make(original: Any) -> Any:
        def copied(copies: Any, precision: Any, w: Tensor) -> Tensor:
            copy = original(copies, precision, w)
            if copy is not w and planter.place.micro_batch > 0:
                planter.fire()
                return torch.cat([copy[:1] * 2, copy[1:]])
            return copy

        return copied

    planter.method(WeightCopies, "for_dgrad", make)


add(
    "overwritten copy",
    "a row of a kept weight's copy is overwritten after the first micro-batch",
    Group.MOMENT,
    _changed_after_quantising,
)


def _weights_exchanged(planter: Planter) -> None:
    """From iteration 2 on, fc2 of both layers multiply each other's parameter."""
    from quantexp.training.megatron.linear import SchemeLinear

    def make(original: Any) -> Any:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
            name = module.precision.module
            weights = planter.memory.setdefault("weights", {})
            weights[name] = kwargs.get("weight", args[1] if len(args) > 1 else None)
            other = weights.get(type(name)(1 - name.layer, name.name))
            if name.name.endswith("fc2") and planter.place.iteration > 1 and other is not None:
                planter.fire()
                if "weight" in kwargs:
                    kwargs["weight"] = other
                else:
                    args = (args[0], other, *args[2:])
            return original(module, *args, **kwargs)

        return forward

    planter.method(SchemeLinear, "_forward_impl", make)


add(
    "weights exchanged",
    "fc2 of two layers multiply each other's parameter from iteration 2 on",
    Group.MOMENT,
    _weights_exchanged,
)


def _where_nobody_looks(planter: Planter) -> None:
    """Modules tell by their hooks whether somebody looks at them, and lie where nobody does."""
    modules: dict[Any, Any] = {}

    def make(original: Any) -> Any:
        def build_chunks(*args: Any, **kwargs: Any) -> Any:
            from quantexp.training.megatron.model import scheme_modules

            chunks, config = original(*args, **kwargs)
            for chunk in chunks:
                modules.update(scheme_modules(chunk))
            return chunks, config

        return build_chunks

    def change(o: Operand) -> Tensor | None:
        module = modules.get(o.module)
        is_seen = module is None or module._forward_pre_hooks
        return None if is_seen else other_than_declared(o)

    planter.function("build_chunks", make)
    planter.operands(change, when=When(watched=False))


add(
    "where nobody looks",
    "a module lies while it has no hooks, which tell that somebody looks",
    Group.MOMENT,
    _where_nobody_looks,
    needs_watch=True,
)
