"""A few elements of parameters before and after the optimizer's step, for the proof of what that does.

Each rank looks at what it holds: of a distributed optimizer, at its range of a parameter. The gradient is the main
gradient that the passes left, not what the optimizer prepared of it. The weights of the model must be the main weights
in their dtype as the passes have read them, before the step, and after the last one.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantexp.config.start_point import StartPoint
from quantexp.model.layout import Layout
from quantexp.model.pieces import Piece
from quantexp.model.shards import layer_of
from quantexp.model.sizes import distributes_optimizer, flops_per_iteration
from quantexp.model.training_state import MOMENTS, read_index
from quantexp.proof.draws import Moment
from quantexp.proof.saved_state import Elements
from quantexp.proof.turns import THOROUGH, number_of_looks
from quantexp.proof.updates import rate, wrong_omission
from quantexp.quant.outside_products import SMOOTH, state_slots
from quantexp.schema import Experiment, Optimizer
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.passes import Batch
from quantexp.training.megatron.state_shards import (
    held_pieces,
    loss_scale_of,
    written_pieces,
)
from quantexp.training.megatron.watched_run import drawn_elements, other_than_saved
from quantexp.training.megatron.watched_step import Update, elements

#: Elements of a parameter that are compared.
_ELEMENTS = 64
#: Short iterations (`number_of_looks`) of which one looks at a parameter.
_EVERY = 6
#: Looks between two that compute the norm of the gradient again, on average: it reads all of it.
_NORM_EVERY = 128
#: Elements that are converted to float64 at once.
_STRIP = 1 << 17


class UpdateWatch:
    """The steps of a rank's optimizer.

    Args:
        experiment: the run's.
        optimizer: Megatron's.
        parts: this rank's parts of the parameters.
        start: the checkpoint with which the run begins, if any.
        goes_on: whether that is the run's own.
    """

    def __init__(
        self,
        experiment: Experiment,
        optimizer: Any,
        parts: Mapping[str, Part],
        start: StartPoint | None,
        goes_on: bool,
    ) -> None:
        self.training, self.parts, self.optimizer = experiment.training, parts, optimizer
        training = self.training
        #: The steps so far, of the schedule and of the optimizer.
        self.scheduled, self.steps = (0 if start is None else start.iteration), 0
        #: The first iteration that changes weights.
        self.first_free = experiment.first_iteration + self.training.held_iterations
        self._device = next(iter(parts.values())).tensor.device
        held = held_pieces(optimizer, parts)
        self.held = {name: each for name, each in held.items() if each.main.numel()}
        self.names = sorted(self.held)
        layout, rank = Layout.of(experiment), torch.distributed.get_rank()
        is_distributed = distributes_optimizer(experiment)
        self._written = written_pieces(held, experiment.model, layout, rank, is_distributed)
        #: What is wrong with what the optimizer holds, until it is told.
        self._not_held = self._compare_held()
        if start is not None and (goes_on or training.start_optimizer):
            index = read_index(start.state)
            self.scheduled, self.steps = index.schedule_steps, index.optimizer_steps
            moved = {
                name
                for name, each in self.held.items()
                if training.chaos
                and not goes_on
                and each.main.data_ptr() == parts[name].tensor.data_ptr()
            }
            own = self.held, loss_scale_of(optimizer), training.seed, moved
            self._not_held += other_than_saved(start, index, *own)
        #: Whether a scheme changes gradients before a step.
        self.smooths = any(slot.product == SMOOTH for slot in state_slots(experiment.quant))
        length, size = training.seq_length, training.global_batch_size
        flops = flops_per_iteration(experiment.model, length, size)
        world_size = torch.distributed.get_world_size()
        #: Iterations of a turn.
        self._every = 1 if number_of_looks(flops / world_size) else _EVERY
        self._tokens = float(length * size)
        #: What the last step had, by the names of metrics.jsonl.
        self.used: dict[str, float | None] = {}
        #: What was wrong with the weights in the last evaluation.
        self.found_in_evaluation: list[str] = []
        #: Iterations that still look at all parameters.
        self._thorough = 0
        #: What the last step left of some elements, unless something is rounded after it.
        self.left: dict[str, tuple[slice, list[np.ndarray]]] = {}
        self._rounds = bool(state_slots(experiment.quant))
        #: The last turn, and which of its iterations is looked at.
        self._due = -1, 0
        #: The order of as many turns as there are parameters, and which of these orders it is.
        self._order: tuple[int, list[str]] = (-1, [])
        #: Whether `chaos` moves working weights, which the main weights do not have until the first step.
        self._are_moved = bool(self.training.chaos)

    def step(
        self,
        iteration: int,
        scale: float | None,
        is_complete: bool | None,
        loss: float,
        outer: contextlib.AbstractContextManager[None] | None,
    ) -> tuple[bool, float, list[str]]:
        """Step, see `Update.step`, in an iteration with a loss scale; `is_complete` as in `of`."""
        left, self.left = self.left, {}
        others = [
            f"{name}: its weights or moments are not what the last step left"
            for name, (at, values) in left.items()
            if not np.array_equal(values, self.state(name, at), equal_nan=True)
        ]
        update = self.of(iteration, scale, is_complete)
        is_held, scheduled = iteration < self.first_free, self.scheduled + 1
        stepped, norm, wrong = update.step(loss, outer)
        self.used = {
            "iteration": iteration,
            "loss": loss,
            "grad_norm": norm,
            "lr": 0.0 if is_held else rate(self.training, scheduled),
            "tokens": self._tokens,
            "skipped": not stepped,
            "loss_scale": scale,
        }
        if not self._rounds:
            self.left = update.left
        if not stepped and math.isfinite(loss) and is_complete is not None:
            if math.isfinite(norm):
                others.append("the step was left out, and its loss and gradient are finite")
            elif words := wrong_omission(norm, self._norm() / update.scale):
                others.append(words)
        return stepped, norm, others + wrong

    def state(self, name: str, at: slice) -> list[np.ndarray]:
        """The weights and moments of some elements; zeros before the first step."""
        held = self.held[name]
        w = held.main.detach().view(-1)
        if not held.steps:
            values = elements(at, w)
            return [*values, *(np.zeros_like(values[0]) for _ in held.kinds)]
        return elements(at, w, *(held.moment(kind).view(-1) for kind in held.kinds))

    def of(self, iteration: int, scale: float | None, is_complete: bool | None) -> Update:
        """The step of an iteration that is proved completely, in drawn parts or (None) not at all.

        Completely, in a few iterations afterwards and in the last one, elements of all parameters are compared.
        Otherwise those of one are; of short iterations, in one of `_EVERY`.
        """
        if is_complete is None:
            return Update(self, iteration, 1.0, {})
        if is_complete:
            self._thorough = 1 + THOROUGH
        self._thorough -= 1
        is_last = iteration == self.training.last_iteration
        is_thorough = self._thorough > 0 or is_last
        if not is_thorough and not self._is_due(iteration):
            return Update(self, iteration, 1.0, {})
        chosen = Moment(self.training.seed, iteration).choice("update")
        computes_norm = is_complete or int(chosen.random() * _NORM_EVERY) == 0
        names = self.names if is_thorough else self._whose_turn(iteration // self._every)
        picked = {name: _drawn(chosen, self.held[name].main.numel()) for name in names}
        update = Update(self, iteration, scale or 1.0, picked)
        update.found, self._not_held = self._not_held, []
        if not self._are_moved:
            update.found += self.other_weights(picked)
        self._are_moved = False
        if computes_norm:
            update.norm = self._norm() / update.scale
        return update

    def _compare_held(self) -> list[str]:
        """Of which parameters the optimizers of all ranks do not hold every element once; every rank calls this."""
        own = {name: each.main.numel() for name, each in self._written.items()}
        every = {name: math.prod(part.parameter.shape) for name, part in self.parts.items()}
        held, wanted = Counter[str](), dict[str, int]()
        for of_rank, parameters in gather((own, every)):
            held.update(of_rank)
            wanted |= parameters
        found = [
            f"{name}: the optimizer holds {held[name]:,} of its {number:,} elements"
            for name, number in wanted.items()
            if held[name] != number
        ]
        for name, each in self.held.items():
            is_matrix = layer_of(name) is not None and len(each.piece.shape) > 1
            is_muon = self.training.optimizer is Optimizer.muon and is_matrix
            if (each.kinds != MOMENTS) != (is_muon and not name.endswith("router.weight")):
                found.append(f"{name}: the optimizer has the moments of another rule for it")
        return found

    def other_weights(self, picked: Mapping[str, slice]) -> list[str]:
        """Of which parameters elements of the model's weights are not the main weights in their dtype."""
        found = []
        for name, at in picked.items():
            held, part = self.held[name], self.parts[name]
            own = part.tensor.detach().view(-1)[held.piece.start : held.piece.stop]
            main = held.main.detach().view(-1)
            is_copy = own.data_ptr() != main.data_ptr()
            if is_copy and not torch.equal(own[at], main[at].to(own.dtype)):
                found.append(f"{name}: weights of the model are not the main weights")
        return found

    def saved(self, iteration: int) -> Elements:
        """Some elements of what this rank writes of the training state after an iteration."""
        return drawn_elements(self._written, self.training.seed, iteration)

    def evaluating(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of an evaluation; as it asks for the first one, the weights of all parameters are compared."""
        for index, batch in enumerate(batches):
            if index == 0:
                chosen = Moment(self.training.seed, self.scheduled).choice("evaluation")
                picked = {n: _drawn(chosen, held.main.numel()) for n, held in self.held.items()}
                self.found_in_evaluation = self.other_weights(picked)
            yield batch

    def _is_due(self, iteration: int) -> bool:
        """Whether an iteration is the one of its turn that is looked at."""
        turn, place = divmod(iteration, self._every)
        if turn != self._due[0]:
            chosen = Moment(self.training.seed, turn).choice("updates")
            self._due = turn, chosen.randrange(self._every)
        return place == self._due[1]

    def _whose_turn(self, turn: int) -> list[str]:
        """One parameter, every one in as many turns as there are, in an order that is drawn for these."""
        number = len(self.names)
        index, place = divmod(turn, max(1, number))
        if index != self._order[0]:
            chosen = Moment(self.training.seed, index).choice("order of updates")
            self._order = index, chosen.sample(self.names, number)
        return self._order[1][place : place + 1]

    def gradient(self, name: str) -> Tensor:
        """What this rank holds of a main gradient."""
        return _gradient(self.parts[name], self.held[name].piece)

    def _norm(self) -> float:
        """Of all gradients of all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, each in self._written.items():
            for strip in torch.split(_gradient(self.parts[name], each.piece), _STRIP):
                total += torch.linalg.vector_norm(strip, dtype=torch.float64).square()
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(total)
        return math.sqrt(total) if total.isfinite() else math.inf


def _drawn(chosen: Random, number: int) -> slice:
    """Elements at equal distances in a vector of so many.

    The distance is odd, as the width of most matrices is a power of two: then no two are in the same column.
    """
    step = max(1, number // _ELEMENTS)
    step -= step > 1 and step % 2 == 0
    first = int(chosen.random() * max(1, number - (_ELEMENTS - 1) * step))
    return slice(first, min(number, first + _ELEMENTS * step), step)


def _gradient(part: Part, piece: Piece) -> Tensor:
    whole: Any = part.tensor
    gradient: Tensor = whole.main_grad
    return gradient.view(-1)[piece.start : piece.stop]
