"""The tensors that a configuration captures, with their shapes, computed without torch for `plan`.

# T tokens, B micro-batch, H query heads, G key-value heads, D head_dim (E of a value head)

The number of tokens of a routed expert is known only at run time. Here the tokens are spread evenly, so the sum over a
layer's experts is exact if all of them are captured in the same way and none is sampled.

A sample is a part of a tensor. It depends only on the extent and on the number, so a layer's input, output and
gradients keep the same tokens, in every iteration and run.

    rows    along the first axis: tokens; output width of a weight; sequences of the attention probabilities
    blocks  32 neighbouring rows from a multiple of 32, so that blocks along tokens stay complete
    heads   of query, key, value, attention probabilities, and gradients of these and of the scores; others are complete
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

from quantexp.capture.names import RESIDUAL, ROUTER
from quantexp.capture.operands import (
    EXPONENTIALS,
    SCALE,
    QuantisedOperand,
    is_replaced,
    quantised_operand,
    scale_sample,
    scale_shape,
    source_of,
)
from quantexp.capture.select.rules import (
    RESIDUAL_GRADS,
    RESIDUALS,
    ROUTER_LOGITS,
    Take,
    keeps_operands,
    rules_on,
    take_by,
)
from quantexp.capture.select.schedule import captured_iterations
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Family
from quantexp.model.decoder import (
    ATTENTION,
    EMBEDDING,
    LinearShape,
    is_norm,
    is_routed,
    moe_of,
    norm_widths,
    value_head_dim,
)
from quantexp.model.sizes import element_bytes, shapes_by_layer
from quantexp.quant.precision import ModuleId, ModulePrecision, PrecisionMap, Slots, precision_map
from quantexp.quant.sites import FPROP_P
from quantexp.schema import CaptureConfig, CaptureLevel, Experiment, SampleOf


@dataclass(frozen=True)
class Expected:
    """One tensor of a captured micro-batch."""

    module: ModuleId
    operation: str
    phase: str
    tensor: str
    shape: tuple[int, ...]
    bytes_each: int
    #: Captured once in an iteration (weights, main gradients) instead of once in a micro-batch.
    once: bool = False
    #: Shares another tensor's file: the backward's weight is the forward's.
    shared: bool = False
    take: Take = field(default_factory=lambda: Take(CaptureLevel.tensors))
    #: The operand, if this is a quantised operand or its block scales.
    quantised: QuantisedOperand | None = None
    #: The shape of the values of these block scales.
    scales_of: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the values on disk, without the file's framing (some 2 kB)."""
        if self.shared or self.take.level is not CaptureLevel.tensors:
            return 0
        whole = self.scales_of or self.shape
        sample = sample_of(
            whole, source_of(self.tensor), self.take.sample_of, self.take.sample_count
        )
        if self.scales_of is not None:
            assert self.quantised is not None
            assert self.quantised.block is not None
            dim = self.quantised.dim(len(whole))
            sample = scale_sample(sample, whole, dim, self.quantised.block)
        return prod(sampled_shape(self.shape, sample)) * self.bytes_each


def takes_micro_batch(capture: CaptureConfig, index: int) -> bool:
    """Whether a micro-batch (from 0) of a captured iteration is captured."""
    return capture.collect_micro_batches == 0 or index < capture.collect_micro_batches


def last_captured(experiment: Experiment) -> int:
    """The last captured iteration; 0 if none is."""
    iterations = captured_iterations(experiment.capture, experiment.training.last_iteration)
    return iterations[-1] if iterations else 0


def expected_tensors(experiment: Experiment, iteration: int = 1) -> Iterator[Expected]:
    """Every tensor of one captured micro-batch of an iteration."""
    declared = precision_map(experiment.model, experiment.quant, iteration)
    for giver in _givers(experiment, declared):
        yield from _taken(experiment, giver, _rules_on(experiment, giver))


def expected_alike(
    experiment: Experiment, declared: PrecisionMap
) -> Iterator[tuple[int, list[Expected]]]:
    """For counting under a precision map: the number of modules of one kind, and the tensors of the first of them.

    There are many layers and experts, but few kinds of them.
    """
    alike: dict[Hashable, list[_Giver]] = {}
    for giver in _givers(experiment, declared):
        rules = tuple(_rules_on(experiment, giver))
        key = (giver.make, giver.follows_from, id(giver.precision.alike), rules)
        alike.setdefault(key, []).append(giver)
    for givers in alike.values():
        first = givers[0]
        yield len(givers), list(_taken(experiment, first, _rules_on(experiment, first)))


@dataclass(frozen=True)
class _Giver:
    """A module whose tensors are captured: its declaration, and the function that lists its tensors."""

    precision: ModulePrecision
    make: Callable[..., Iterator[Expected]]
    follows_from: tuple[Hashable, ...] = ()


def _givers(experiment: Experiment, declared: PrecisionMap) -> Iterator[_Giver]:
    model = experiment.model
    shapes = shapes_by_layer(model)
    for module, precision in declared.items():
        if module.name == ATTENTION:
            divides_later = precision.spec(FPROP_P).softmax.unnormalised
            yield _Giver(precision, _attention, (divides_later,))
        elif is_norm(module.name):
            yield _Giver(precision, _norm, (module.name,))
        elif module.name != EMBEDDING:
            shape = shapes[module.layer][module.name]
            yield _Giver(precision, _linear, (_tokens(experiment, module), shape))
    nothing: Slots = {}
    for layer in range(model.num_layers):
        residual = ModulePrecision(ModuleId(layer, RESIDUAL), nothing)
        yield _Giver(residual, _residual, (layer == 0,))
        if (moe := moe_of(model, layer)) is not None:
            router = ModulePrecision(ModuleId(layer, ROUTER), nothing)
            yield _Giver(router, _router, (moe.num_experts,))


def _rules_on(experiment: Experiment, giver: _Giver) -> list[int]:
    return rules_on(experiment.capture, experiment.model.num_layers, giver.precision.module)


def _taken(experiment: Experiment, giver: _Giver, rules: Sequence[int]) -> Iterator[Expected]:
    """The tensors that the rules of a module keep; a weight dropped in the forward has its own file in the backward."""
    capture, precision = experiment.capture, giver.precision
    tensors = list(giver.make(experiment, precision.module, *giver.follows_from))
    if keeps_operands(capture):
        tensors += _quantised(precision, tensors)
    dropped: set[str] = set()
    for expected in tensors:
        name = expected.tensor if expected.quantised is None else expected.quantised.tensor
        taken = take_by(capture, rules, expected.operation, name)
        taken = taken.unless_replaced(
            partial(is_replaced, precision, expected.operation, expected.tensor)
        )
        if taken.level is CaptureLevel.off:
            dropped.add(expected.tensor)
        else:
            shared = expected.shared and expected.tensor not in dropped
            yield replace(expected, take=taken, shared=shared)


def _quantised(precision: ModulePrecision, tensors: list[Expected]) -> Iterator[Expected]:
    """The quantised operands of a module, each followed by its block scales if it has any."""
    by_name = {each.tensor: each for each in tensors}
    for slot, spec in precision.slots.items():
        quantised = quantised_operand(slot, spec)
        if quantised is None:
            continue
        source, block = by_name[quantised.source], quantised.block
        values = replace(
            source,
            operation=quantised.operation,
            phase="pre",
            tensor=quantised.tensor,
            once=quantised.once,
            shared=False,
            quantised=quantised,
        )
        yield values
        if block is not None:
            yield replace(
                values,
                tensor=quantised.tensor + SCALE,
                shape=scale_shape(values.shape, quantised.dim(len(values.shape)), block),
                bytes_each=_scale_bytes(spec),
                scales_of=values.shape,
            )


def _scale_bytes(spec: QuantSpec) -> int:
    """Bytes of a block scale: of a code, or in the family `grid` of the factor."""
    return 4 if spec.fmt.family is Family.GRID else 1


def _linear(
    experiment: Experiment, module: ModuleId, tokens: tuple[int, ...], shape: LinearShape
) -> Iterator[Expected]:
    x, y = (*tokens, shape.input_width), (*tokens, shape.output_width)
    w = (shape.output_width, shape.input_width)
    size = element_bytes(experiment.training)
    yield Expected(module, "forward", "pre", "input", x, size)
    yield Expected(module, "forward", "pre", "weight", w, size, once=True)
    yield Expected(module, "forward", "post", "output", y, size)
    yield Expected(module, "backward", "pre", "grad_output", y, size)
    yield Expected(module, "backward", "pre", "weight", w, size, once=True, shared=True)
    yield Expected(module, "backward", "post", "grad_input", x, size)
    yield Expected(module, "backward", "post", "grad_weight", w, size)
    yield Expected(module, "backward", "post", "main_grad", w, 4, once=True)


def _norm(experiment: Experiment, module: ModuleId, name: str) -> Iterator[Expected]:
    """The gain, and the result before its rounding: of the residual stream or a latent, or of every head."""
    T, B = experiment.training.seq_length, experiment.training.micro_batch_size
    model, size = experiment.model, element_bytes(experiment.training)
    width = norm_widths(model).get(name, model.hidden_size)
    heads = {"q-norm": model.num_attention_heads, "k-norm": model.num_query_groups}
    of_heads = (heads[name],) if model.mla is None and name in heads else ()
    yield Expected(module, "forward", "pre", "weight", (width,), size, once=True)
    yield Expected(module, "forward", "post", "output", (T, B, *of_heads, width), size)


def _tokens(experiment: Experiment, module: ModuleId) -> tuple[int, ...]:
    """[T, B], or an even share of them for a routed expert; the first experts get the remainder."""
    T, B = experiment.training.seq_length, experiment.training.micro_batch_size
    moe = moe_of(experiment.model, module.layer)
    if moe is None or not is_routed(module.name):
        return (T, B)
    expert = int(module.name.removeprefix("expert").partition("-")[0])
    share, rest = divmod(T * B * moe.top_k, moe.num_experts)
    return (share + (expert < rest),)


def _attention(experiment: Experiment, module: ModuleId, divides_later: bool) -> Iterator[Expected]:
    T, B = experiment.training.seq_length, experiment.training.micro_batch_size
    model, size = experiment.model, element_bytes(experiment.training)
    H, G, D = model.num_attention_heads, model.num_query_groups, model.head_dim
    E = value_head_dim(model)
    q, k, v, P, o = (T, B, H, D), (T, B, G, D), (T, B, G, E), (B, H, T, T), (T, B, H * E)
    yield Expected(module, "forward", "pre", "query", q, size)
    yield Expected(module, "forward", "pre", "key", k, size)
    yield Expected(module, "forward", "pre", "value", v, size)
    yield Expected(module, "forward", "post", "attn_weights", P, size)
    if divides_later:
        yield Expected(module, "forward", "post", EXPONENTIALS, P, size)
    yield Expected(module, "forward", "post", "output", o, size)
    yield Expected(module, "backward", "pre", "grad_output", (T, B, H, E), size)
    yield Expected(module, "backward", "pre", "grad_scores", P, size)
    yield Expected(module, "backward", "post", "grad_attn_weights", P, size)
    yield Expected(module, "backward", "post", "grad_query", q, size)
    yield Expected(module, "backward", "post", "grad_key", k, size)
    yield Expected(module, "backward", "post", "grad_value", v, size)


def _residual(experiment: Experiment, module: ModuleId, is_first: bool) -> Iterator[Expected]:
    T, B = experiment.training.seq_length, experiment.training.micro_batch_size
    shape, size = (T, B, experiment.model.hidden_size), element_bytes(experiment.training)
    for name, gradient in zip(RESIDUALS, RESIDUAL_GRADS, strict=True):
        enters = name == "resid_pre"
        if not enters or is_first:
            yield Expected(module, "forward", "pre" if enters else "post", name, shape, size)
            yield Expected(module, "backward", "post" if enters else "pre", gradient, shape, size)


def _router(experiment: Experiment, module: ModuleId, num_experts: int) -> Iterator[Expected]:
    """The router computes in float32 in any working precision."""
    T, B = experiment.training.seq_length, experiment.training.micro_batch_size
    logits, gradient = ROUTER_LOGITS
    yield Expected(module, "forward", "post", logits, (T, B, num_experts), 4)
    yield Expected(module, "backward", "pre", gradient, (T, B, num_experts), 4)


BLOCK = 32
#: The axis of the heads in tensors that have heads.
_HEAD_AXIS = {"attn_weights": 1, "exp_scores": 1, "grad_attn_weights": 1, "grad_scores": 1}
_WITH_HEADS = frozenset({"query", "key", "value", "grad_query", "grad_key", "grad_value"})


def sample_of(
    shape: tuple[int, ...], tensor_name: str, of: SampleOf, count: int
) -> dict[str, Any] | None:
    """The sample as in the metadata: axis and ascending indices; None if the whole tensor is kept."""
    axis = 0
    if of is SampleOf.heads:
        if tensor_name not in _WITH_HEADS and tensor_name not in _HEAD_AXIS:
            return None
        axis = _HEAD_AXIS.get(tensor_name, 2)
    if not count or not shape:
        return None
    extent = shape[axis]
    units = -(-extent // BLOCK) if of is SampleOf.blocks else extent
    if count >= units:
        return None
    chosen = sorted(random.Random(f"{of.value} {extent}").sample(range(units), count))
    if of is SampleOf.blocks:
        chosen = [i for b in chosen for i in range(b * BLOCK, min(extent, (b + 1) * BLOCK))]
    return {"of": of.value, "axis": axis, "indices": chosen, "shape": list(shape)}


def sampled_shape(shape: tuple[int, ...], sample: dict[str, Any] | None) -> tuple[int, ...]:
    """The shape of the sample."""
    if sample is None:
        return shape
    axis = sample["axis"]
    return (*shape[:axis], len(sample["indices"]), *shape[axis + 1 :])
