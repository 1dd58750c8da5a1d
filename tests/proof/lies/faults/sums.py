"""What the optimizer gets is another than the ranks' passes left, or a run goes on with another state than it saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from tests.proof.lies.planting import Planter

from .fault import Group, add

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_MEGATRON = "quantexp.training.megatron"
_E5M2 = torch.float8_e5m2


def _reduction(
    change: Callable[[Planter, Any, Callable[[], Any]], Any], since: int = 1
) -> Callable[[Planter], None]:
    """Another reduction of a group of buckets; `change` may call the right one."""

    def plant(planter: Planter) -> None:
        def make(original: Any) -> Any:
            def start(group: Any, *args: Any, **kwargs: Any) -> Any:
                def right() -> Any:
                    return original(group, *args, **kwargs)

                if planter.place.iteration < since:
                    return right()
                planter.fire()
                return change(planter, group, right)

            return start

        owner = import_module(_BUCKETS)._ParamAndGradBucketGroup
        planter.method(owner, "start_grad_sync", make)

    return plant


def _halved_on_rank_1(planter: Planter, group: Any, right: Callable[[], Any]) -> Any:
    if planter.place.rank == 1:
        for bucket in group.buckets:
            bucket.grad_data.mul_(0.5)
    return right()


def _in_bf16(planter: Planter, group: Any, right: Callable[[], Any]) -> Any:
    result = right()
    for bucket in group.buckets:
        bucket.grad_data.copy_(bucket.grad_data.bfloat16())
    return result


def _left_out(module: str, name: str) -> Callable[[Planter], None]:
    """A function does nothing."""

    def plant(planter: Planter) -> None:
        planter.attribute(import_module(module), name, lambda *args, **kwargs: planter.fire())

    return plant


for _name, _line, _plant, _tags in (
    (
        "gradients not reduced from 2",
        "every rank keeps its own gradients, from iteration 2 on",
        _reduction(lambda p, g, right: None, since=2),
        "data",
    ),
    (
        "gradients of rank 1 halved",
        "rank 1 adds half of its gradients to the sum",
        _reduction(_halved_on_rank_1),
        "data context",
    ),
    (
        "sums of gradients in bf16",
        "the sum of the ranks' gradients is rounded to bf16",
        _reduction(_in_bf16),
        "data context pipeline",
    ),
    (
        "gains not added over ranks",
        "each tensor-parallel rank keeps the gradients of gains of its own tokens",
        _left_out(_FINALIZE, "_allreduce_non_tensor_model_parallel_grads"),
        "sequence",
    ),
    (
        "tied embedding not added over stages",
        "the first and the last stage keep their own gradients of the embedding",
        _left_out(_FINALIZE, "_allreduce_word_embedding_grads"),
        "pipeline",
    ),
):
    add(_name, _line, Group.LAYOUT, _plant, _tags)


def _got_in_e5m2(planter: Planter, since: int = 1, *, evaluates: bool = False) -> None:
    """A stage gets other activations than the one before it sends."""

    def make(original: Any) -> Any:
        def set_input_tensor(model: Any, received: Any) -> None:
            x = received[0] if isinstance(received, list) else received
            is_due = planter.place.iteration >= since and torch.is_grad_enabled() is not evaluates
            if x is not None and is_due:
                planter.fire()
                x.data.copy_(x.data.to(_E5M2))
            original(model, received)

        return set_input_tensor

    owner: Any = import_module("megatron.core.models.gpt.gpt_model").GPTModel
    planter.method(owner, "set_input_tensor", make)


def _gradient_got_halved(planter: Planter) -> None:
    """A stage gets half of the gradient that the next one sends."""
    owner = import_module("megatron.core.pipeline_parallel.schedules")
    original = vars(owner)["backward_step"]

    def backward_step(entered: Any, left: Any, gradient: Any, *args: Any, **kwargs: Any) -> Any:
        g = gradient[0] if isinstance(gradient, list) else gradient
        if g is not None:
            planter.fire()
            g.data.mul_(0.5)
        return original(entered, left, gradient, *args, **kwargs)

    planter.attribute(owner, "backward_step", backward_step)


for _name, _line, _plant in (
    ("activations sent in e5m2", "a stage gets activations in E5M2", _got_in_e5m2),
    (
        *("activations sent in e5m2 from 3", "the same from iteration 3 on"),
        partial(_got_in_e5m2, since=3),
    ),
    (
        *("activations sent in e5m2 in evaluations", "the same in validations alone"),
        partial(_got_in_e5m2, evaluates=True),
    ),
    ("half gradient sent", "a stage gets half of the next one's gradient", _gradient_got_halved),
):
    add(_name, _line, Group.LAYOUT, _plant, "pipeline")


def _restored(change: Callable[[Any], object]) -> Callable[[Planter], None]:
    """Something for what a rank holds of each matrix, after it has read a checkpoint."""

    def plant(planter: Planter) -> None:
        owner = import_module(f"{_MEGATRON}.state_shards")
        original = vars(owner)["_load_own"]

        def load(folder: Any, held: Any) -> Any:
            index = original(folder, held)
            for each in held.values():
                if len(each.piece.shape) > 1:
                    planter.fire()
                    change(each)
            return index

        planter.attribute(owner, "_load_own", load)

    return plant


for _name, _line, _change in (
    (
        "moments lost",
        "a run that goes on begins with moments of zero",
        lambda held: held.moment("exp_avg").zero_(),
    ),
    (
        "second moments in bf16",
        "a run that goes on has second moments in bf16",
        lambda held: held.moment("exp_avg_sq").copy_(held.moment("exp_avg_sq").bfloat16()),
    ),
    (
        "weights restored in bf16",
        "a run that goes on has main weights in bf16",
        lambda held: held.main.copy_(held.main.bfloat16()),
    ),
):
    add(_name, _line, Group.PASS, _restored(_change), "resume")


def _printed(planter: Planter) -> None:
    """The loss that is written is another than that which is learned from."""
    owner: Any = import_module(f"{_MEGATRON}.step").Stepper

    def make(original: Any) -> Any:
        def mean_loss(stepper: Any, own: Any) -> float:
            planter.fire()
            return 0.99 * float(original(stepper, own))

        return mean_loss

    planter.method(owner, "mean_loss", make)


add("smaller loss written", "metrics.jsonl has 0.99 of the loss", Group.STATE, _printed)


def _written(change: Callable[[Any], Any]) -> Callable[[Planter], None]:
    """Another line of metrics.jsonl than the step's, from iteration 2 on."""

    def plant(planter: Planter) -> None:
        owner: Any = import_module(f"{_MEGATRON}.step").Stepper

        def make(original: Any) -> Any:
            def step(stepper: Any, *args: Any, **kwargs: Any) -> Any:
                metrics = original(stepper, *args, **kwargs)
                if metrics.iteration < 2:
                    return metrics
                planter.fire()
                return change(metrics)

            return step

        planter.method(owner, "step", make)

    return plant


for _name, _line_of, _change, _tags in (
    ("smaller norm", "0.99 of the norm", lambda m: replace(m, grad_norm=0.99 * m.grad_norm), ""),
    ("next loss", "0.999 of the loss", lambda m: replace(m, loss=0.999 * m.loss), ""),
    ("other rate", "0.999 of the rate", lambda m: replace(m, lr=0.999 * m.lr), ""),
    ("other tokens", "the tokens of half a batch", lambda m: replace(m, tokens=m.tokens // 2), ""),
    ("taken step", "that a step was left out", lambda m: replace(m, skipped=True), ""),
    (
        *("smaller balancing loss", "0.99 of the balancing loss"),
        *(lambda m: replace(m, aux_loss=0.99 * m.aux_loss), "experts"),
    ),
):
    _words = f"metrics.jsonl has {_line_of}, from iteration 2 on"
    add(f"{_name} in the line from 2", _words, Group.STATE, _written(_change), _tags)


def _evaluated_line(planter: Planter) -> None:
    owner = import_module(f"{_MEGATRON}.trainer")
    original = vars(owner)["_evaluated"]

    def evaluated(*args: Any) -> Any:
        planter.fire()
        metrics = original(*args)
        return replace(metrics, validation_loss=0.99 * metrics.validation_loss)

    planter.attribute(owner, "_evaluated", evaluated)


add(
    "smaller validation loss in the line",
    "metrics.jsonl has 0.99 of the validation loss",
    Group.PASS,
    _evaluated_line,
    "validation",
)


def _gradient(
    change: Callable[[Any], Any], *names: str, since: int = 1, micro_batch: int | None = None
) -> Callable[[Planter], None]:
    """Another gradient of some parameters: by a hook, before it is added to the main gradient."""

    def plant(planter: Planter) -> None:
        owner: Any = import_module(f"{_MEGATRON}.step").Stepper

        def make(original: Any) -> Any:
            def init(stepper: Any, *args: Any, **kwargs: Any) -> None:
                original(stepper, *args, **kwargs)
                for name, part in stepper.parts.items():
                    if name.endswith(names):
                        part.tensor.register_hook(changed)

            return init

        def changed(g: Any) -> Any:
            place = planter.place
            if place.iteration < since or micro_batch not in (None, place.micro_batch):
                return g
            planter.fire()
            return change(g)

        planter.method(owner, "__init__", make)

    return plant


def _not_embedded(planter: Planter) -> None:
    """A tied table gets the gradient of the output layer alone."""
    owner: Any = import_module("megatron.core.tensor_parallel").VocabParallelEmbedding

    def make(original: Any) -> Any:
        def forward(module: Any, tokens: Any) -> Any:
            planter.fire()
            y = original(module, tokens)
            return y.detach().requires_grad_() if y.requires_grad else y

        return forward

    planter.method(owner, "forward", make)


_TABLES = "word_embeddings.weight", "output_layer.weight"
for _name, _line, _plant, _tags in (
    (
        "embedding's gradient halved from 2",
        "the gradient of the embedding, and of the output layer, is half of what it is, from iteration 2 on",
        _gradient(lambda g: g / 2, *_TABLES, since=2),
        "",
    ),
    (
        "embedding's gradient in fp8",
        "the gradient of the embedding, and of the output layer, is rounded to E5M2",
        _gradient(lambda g: (g.float() * 4096).to(_E5M2).to(g.dtype) / 4096, *_TABLES),
        "",
    ),
    ("embedding without gradient", "the embedding has no gradient of its own", _not_embedded, ""),
    (
        "router's gradient negated",
        "a router moves away from the experts that it should choose",
        _gradient(lambda g: -g, "router.weight"),
        "experts",
    ),
):
    add(_name, _line, Group.RESULT, _plant, _tags)


def _evaluated(change: Callable[[Any], Any]) -> Callable[[Planter], None]:
    """Other sums of an evaluation: of losses, and of tokens."""

    def plant(planter: Planter) -> None:
        owner: Any = import_module(f"{_MEGATRON}.passes").Passes

        def make(original: Any) -> Any:
            def evaluate(passes: Any, held_out: Any) -> Any:
                planter.fire()
                return change(lambda batches: original(passes, batches))(list(held_out))

            return evaluate

        planter.method(owner, "evaluate", make)

    return plant


for _name, _line, _change in (
    (
        "smaller validation loss written",
        "the validation loss is 0.99 of what it is",
        lambda right: lambda batches: right(batches) * torch.tensor([0.99, 1.0]),
    ),
    (
        "half of the held-out samples",
        "half of the held-out samples are evaluated",
        lambda right: lambda batches: right(batches[: len(batches) // 2]),
    ),
):
    add(_name, _line, Group.PASS, _evaluated(_change), "validation")


def _saved(change: Callable[[Planter, dict[str, Any]], dict[str, Any]]) -> Any:
    """Other tensors are written into a checkpoint than the rank holds."""

    def plant(planter: Planter) -> None:
        owner: Any = import_module(f"{_MEGATRON}.state_shards").RankState

        def make(original: Any) -> Any:
            def named(state: Any) -> Any:
                planter.fire()
                return iter(change(planter, dict(original(state))).items())

            return named

        planter.method(owner, "named_tensors", make)

    return plant


def _each(kind: str, change: Callable[[Any], Any]) -> Callable[[Planter, dict[str, Any]], Any]:
    return lambda _, x: {n: change(t) if n.startswith(f"{kind}/") else t for n, t in x.items()}


def _on_rank_1(planter: Planter, tensors: dict[str, Any]) -> dict[str, Any]:
    if planter.place.rank != 1:
        return tensors
    return {n: t if n.startswith("main/") else torch.zeros_like(t) for n, t in tensors.items()}


def _exchanged(_: Planter, tensors: dict[str, Any]) -> dict[str, Any]:
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    named = ((n.partition("/"), t) for n, t in tensors.items())
    return {f"{other.get(kind, kind)}/{name}": t for (kind, _, name), t in named}


def _without_one(_: Planter, tensors: dict[str, Any]) -> dict[str, Any]:
    last = max(name for name in tensors if name.startswith("main/"))
    return {name: x for name, x in tensors.items() if name != last}


for _name, _line, _written_as in (
    (
        "first moments saved in bf16",
        "a checkpoint has first moments in bf16",
        _each("exp_avg", lambda x: x.bfloat16().to(x.dtype)),
    ),
    (
        "weights saved in bf16",
        "a checkpoint has main weights in bf16",
        _each("main", lambda x: x.bfloat16().to(x.dtype)),
    ),
    ("moments of rank 1 saved as zeros", "a checkpoint has no moments of rank 1", _on_rank_1),
    ("moments saved exchanged", "each moment is saved as the other", _exchanged),
    ("a tensor that is not saved", "a checkpoint lacks the weights of a parameter", _without_one),
    (
        "rows saved rolled",
        "each element is saved one place later",
        _each("main", lambda x: x.flatten().roll(1).view(x.shape)),
    ),
):
    add(_name, _line, Group.PASS, _saved(_written_as), "saved")
