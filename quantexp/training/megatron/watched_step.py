"""One step of the optimizer as the watcher sees it: some elements of parameters, and whole matrices that Muon moves.

Of a matrix that ranks divide no rank has the momentum of all; its direction is not compared.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from quantexp.model.huggingface.blocks import blocks_of
from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.shards import WHOLE
from quantexp.model.training_state import MOMENTS, MOMENTUM
from quantexp.proof.master_weights import AdamStep
from quantexp.proof.muon import wrong_direction
from quantexp.proof.updates import Held as Elements
from quantexp.proof.updates import clipped, rate, wrong_norm, wrong_step
from quantexp.training.megatron.finite import step_if_finite
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.state_shards import Held


@dataclass
class Update:
    """One step."""

    #: The `UpdateWatch` that looks at it.
    watch: Any
    iteration: int
    #: The loss scale.
    scale: float
    #: The elements that are compared, by parameter.
    picked: dict[str, slice]
    #: Of the gradient, as the watcher computes it; None if it does not.
    norm: float | None = None

    def __post_init__(self) -> None:
        self.found: list[str] = []
        self._before: dict[str, list[np.ndarray]] = {}
        self._after: dict[str, list[np.ndarray]] = {}
        watch = self.watch
        self._directions = {
            name: Direction(
                watch.parts[name].parameter, watch.held[name], watch.gradient(name) / self.scale
            )
            for name in one_of_each(self.picked, watch.held, watch.parts, self.iteration)
        }
        self._gradients = {
            name: elements(at, watch.gradient(name))[0] / self.scale
            for name, at in self.picked.items()
        }

    def step(
        self, loss: float, outer: contextlib.AbstractContextManager[None] | None
    ) -> tuple[bool, float, list[str]]:
        """`step_if_finite`, and what is wrong with the step in words; `outer` is entered around the step alone.

        It prepares gradients, and rounds what the step leaves.
        """
        if outer is not None:
            stepped, norm = step_if_finite(self.watch.optimizer, loss, self._inside(outer))
        else:
            self._take()
            stepped, norm = step_if_finite(self.watch.optimizer, loss)
            self._look()
        return stepped, norm, self._failures(norm) if stepped else []

    @property
    def left(self) -> dict[str, tuple[slice, list[np.ndarray]]]:
        """What the step left of the picked elements: weights and moments."""
        return {name: (at, self._after[name]) for name, at in self.picked.items()}

    @contextlib.contextmanager
    def _inside(self, outer: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        with outer:
            if self.watch.smooths:
                self._take_prepared()
            self._take()
            yield
            self._look()

    def _take(self) -> None:
        self._before = {name: self.watch.state(name, at) for name, at in self.picked.items()}
        for direction in self._directions.values():
            direction.take()

    def _look(self) -> None:
        self._after = {name: self.watch.state(name, at) for name, at in self.picked.items()}
        for direction in self._directions.values():
            direction.look()

    def _take_prepared(self) -> None:
        """The gradients that the optimizer has, where a scheme has changed them."""
        for name, at in self.picked.items():
            gradient: Any = self.watch.held[name].main.grad
            self._gradients[name] = elements(at, gradient.view(-1))[0]

    def _failures(self, norm: float) -> list[str]:
        """What is wrong after a step whose gradients were clipped by a norm."""
        watch, training = self.watch, self.watch.training
        watch.scheduled += 1
        watch.steps += 1
        found = self.found
        if self.norm is not None and (words := wrong_norm(norm, self.norm)):
            found.append(words)
        lr = 0.0 if self.iteration < watch.first_free else rate(training, watch.scheduled)
        for name in self.picked:
            held = watch.held[name]
            if held.steps != watch.steps:
                found.append(f"{name}: the optimizer counts {held.steps} steps, not {watch.steps}")
            before, after = (
                Elements(values[0], values[1:])
                for values in (self._before[name], self._after[name])
            )
            gradient = self._gradients[name]
            if not watch.smooths:
                gradient = clipped(gradient, training, norm)
            betas, step = self._numbers(name, held, lr)
            words = wrong_step(before, after, gradient, betas, step)
            if name in self._directions and not words and not watch.smooths:
                factor = float(clipped(np.ones(1), training, norm)[0])
                words = self._directions[name].wrong(factor, betas[0], lr, training.weight_decay)
            if words:
                found.append(f"{name}: {words}")
        if self.iteration == training.last_iteration:
            found += watch.other_weights(self.picked)
        return list(dict.fromkeys(found))

    def _numbers(self, name: str, held: Held, lr: float) -> tuple[list[float], AdamStep | None]:
        """The betas of the moments, and the numbers of AdamW's step; None of a matrix that Muon moves.

        Megatron-Core decays no vectors and no biases.
        """
        training = self.watch.training
        if held.kinds != MOMENTS:
            return [training.muon_momentum], None
        decays = len(held.piece.shape) > 1 and not name.endswith(".bias")
        beta1, beta2, eps = training.adam_beta1, training.adam_beta2, training.adam_eps
        decay = training.weight_decay if decays else 0.0
        return [beta1, beta2], AdamStep(lr, beta1, beta2, eps, decay, self.watch.steps)


def elements(at: slice, *tensors: Tensor) -> list[np.ndarray]:
    """Some elements of flat tensors, float64."""
    if tensors[0].is_cpu:
        return [x.detach().numpy()[at].astype(np.float64) for x in tensors]
    return [x[at].double().cpu().numpy() for x in tensors]


class Direction:
    """What a step finds and leaves of a matrix."""

    def __init__(self, parameter: Parameter, held: Held, gradient: Tensor) -> None:
        """`parameter` is the whole one, `held` all of it; `gradient` a copy, not clipped, in any shape."""
        self._parameter, self._held = parameter, held
        self._gradient = gradient.view(held.main.shape)

    def take(self) -> None:
        """Before the step."""
        self._before = self._held.main.detach().clone()

    def look(self) -> None:
        """After the step, before anything is rounded."""
        self._after = self._held.main.detach().clone()

    def wrong(self, factor: float, beta: float, lr: float, decay: float) -> str:
        """See `wrong_direction`; the gradient is multiplied by `factor`."""
        rows: dict[str, list[tuple[int, int, int]]] = {}
        for block in blocks_of(self._parameter, WHOLE):
            rows.setdefault(block.tensor, []).append((block.first, block.part_row, block.count))
        matrices = [
            [row for _, at, count in sorted(blocks) for row in range(at, at + count)]
            for blocks in rows.values()
        ]
        momentum = self._held.moment(MOMENTUM)
        own = self._before, self._after, self._gradient * factor, momentum
        return wrong_direction(*own, beta, (lr, decay), matrices)


def one_of_each(
    picked: Iterable[str], held: Mapping[str, Held], parts: Mapping[str, Part], number: int
) -> list[str]:
    """Of the picked matrices that Muon moves and this rank has whole, one of each kind of layer, by a number."""
    by_kind: dict[str, list[str]] = {}
    for name in picked:
        shape, each = parts[name].parameter.shape, held[name]
        if each.kinds == (MOMENTUM,) and each.piece.numel == math.prod(shape):
            by_kind.setdefault(name.split(".")[-2], []).append(name)
    return [names[number % len(names)] for names in by_kind.values()]
