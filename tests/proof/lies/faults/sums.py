"""What the optimizer gets is another than the ranks' passes left, or a run goes on with another state than it saved."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from tests.proof.lies.planting import Planter

from .fault import Group, add

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_MEGATRON = "quantexp.training.megatron"


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
