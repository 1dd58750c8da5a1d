"""What is learned is another than the data says: labels, and the part of each token in the loss."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tests.proof.lies.planting import Planter

from .fault import Group, add

_PASSES = "quantexp.training.megatron.passes"


def _labels(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Planter], None]:
    """Other labels of a micro-batch, from its tokens and labels."""

    def plant(planter: Planter) -> None:
        owner = vars(import_module(_PASSES))["Passes"]

        def make(original: Any) -> Any:
            def on_device(passes: Any, batch: dict[str, Tensor]) -> Any:
                planter.fire()
                labels = change(batch["tokens"], batch["labels"])
                return original(passes, {**batch, "labels": labels})

            return on_device

        planter.method(owner, "_on_device", make)

    return plant


def _batch_before(since: int) -> Callable[[Planter], None]:
    """Each pass has the tokens and labels of the pass before it, as where a rank reads another's data."""

    def plant(planter: Planter) -> None:
        owner = vars(import_module(_PASSES))["Passes"]

        def make(original: Any) -> Any:
            def on_device(passes: Any, batch: dict[str, Tensor]) -> Any:
                before = planter.memory.get("batch", batch)
                planter.memory["batch"] = batch
                if planter.place.iteration < since:
                    return original(passes, batch)
                planter.fire()
                return original(passes, before)

            return on_device

        planter.method(owner, "_on_device", make)

    return plant


def _losses(change: Callable[[Tensor], Tensor], since: int = 1) -> Callable[[Planter], None]:
    """Other losses enter the mean than the tokens have."""

    def plant(planter: Planter) -> None:
        owner = import_module(_PASSES)
        original = vars(owner)["_mean_loss"]

        def mean_loss(losses: Tensor, batch: Any) -> Any:
            if planter.place.iteration < since:
                return original(losses, batch)
            planter.fire()
            return original(change(losses), batch)

        planter.attribute(owner, "_mean_loss", mean_loss)

    return plant


def _doubled(losses: Tensor) -> Tensor:
    """The loss stays, its gradient is twice as large."""
    return 2 * losses - losses.detach()


def _in_part(losses: Tensor) -> Tensor:
    """One token in eight gets no gradient."""
    is_out = torch.arange(losses.shape[-1]) % 8 == 0
    return torch.where(is_out, losses.detach(), losses)


for _name, _line, _plant in (
    (
        "tokens for labels",
        "each token has itself as its label",
        _labels(lambda tokens, labels: tokens),
    ),
    (
        "labels one later",
        "each token has the label of the next one",
        _labels(lambda tokens, labels: labels.roll(-1, -1)),
    ),
    (
        "samples of the pass before from 2",
        "from iteration 2 on each pass has the samples of the pass before it",
        _batch_before(2),
    ),
    (
        "gradient of the loss doubled",
        "all gradients are those of twice the loss",
        _losses(_doubled),
    ),
    (
        "tokens without gradient from 2",
        "one token in eight gets no gradient, from iteration 2 on",
        _losses(_in_part, 2),
    ),
):
    add(_name, _line, Group.RESULT, _plant)
