"""A training in which chosen values become NaN or Inf: in one rank, one iteration and one micro-batch.

As a program, `python poisoned_training.py JOB` trains one rank of several (RANK, WORLD_SIZE) and writes what it
observed beside the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.errors import RunError
from quantexp.runs.metrics import Metrics
from quantexp.runs.ranks import Rank, own_rank
from quantexp.schema import CheckpointConfig, Experiment
from quantexp.training.megatron.session import session
from quantexp.training.megatron.state_shards import held_pieces
from quantexp.training.megatron.trainer import train
from quantexp.training.requests import Request


@dataclass(frozen=True)
class Plant:
    """One value that becomes `value`."""

    #: gradient, loss or weight; a weight stays as it is planted.
    kind: str
    value: float
    iteration: int
    micro_batch: int = 0
    rank: int = 0
    #: Of a gradient or weight: Megatron's name of the parameter, and its element.
    parameter: str = ""
    element: int = 0


@dataclass
class Trace:
    """What a rank observed."""

    metrics: list[Metrics] = field(default_factory=list)
    #: After each iteration: a hash of weights and optimizer state, and the amax histories.
    states: list[int] = field(default_factory=list)
    histories: list[str] = field(default_factory=list)
    #: Whether any weight or moment of any iteration was not finite.
    poisoned: list[int] = field(default_factory=list)
    error: str = ""


class Poisoner:
    """Observes a training, plants, and saves nothing but records."""

    unproved = False

    def __init__(self, plants: Sequence[Plant], rank: int = 0) -> None:
        self.plants = [plant for plant in plants if plant.rank == rank]
        self.trace = Trace()
        self.active: list[Plant] = []

    def built(self, chunks: list[Any]) -> None:
        (model,) = chunks
        self.model = model
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self._gradient(name, gradient))

    def _gradient(self, name: str, gradient: Tensor) -> Tensor | None:
        own = [p for p in self.active if p.kind == "gradient" and p.parameter == name]
        if not own:
            return None
        gradient = gradient.clone()
        for plant in own:
            gradient.view(-1)[plant.element % gradient.numel()] = plant.value
        return gradient

    def proof(
        self, iteration: int, declared: Any, *, is_complete: bool
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def proof_of_evaluation(
        self, iteration: int, declared: Any, *, quantised: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def outside_products(self, watch: Any, stepped: bool) -> None:
        pass

    def updated(self, iteration: int, used: Any, wrong: list[str]) -> None:
        pass

    def evaluated(self, iteration: int, loss: float, wrong: list[str]) -> None:
        pass

    def micro_batch(self, iteration: int, index: int, loss_scale: float | None) -> None:
        place = (iteration, index)
        self.active = [p for p in self.plants if (p.iteration, p.micro_batch) == place]
        for plant in self.active:
            if plant.kind == "weight":
                weight = self.model.get_parameter(plant.parameter).data.view(-1)
                weight[plant.element % weight.numel()] = plant.value

    def needs_gradients(self, iteration: int) -> bool:
        return True

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        pass

    def tokens(self, iteration: int, index: int, tokens: Tensor) -> None:
        pass

    def evaluation(self) -> None:
        self.active = []

    def request(self) -> Request:
        return Request.NONE

    def iteration(self, metrics: Metrics) -> bool:
        self.trace.metrics.append(metrics)
        return True

    def finish(self) -> None:
        pass

    def save(
        self,
        iteration: int,
        chunks: Sequence[Any],
        state: Callable[[], Any],
        nonfinite: int,
        seen: object,
    ) -> None:
        """Records the state after each iteration: what this rank has, also where another one would write it."""
        stepper = state.__self__  # type: ignore[attr-defined]
        held = held_pieces(stepper.optimizer, stepper.parts).values()
        tensors = [p.detach() for chunk in chunks for p in chunk.parameters()]
        tensors += [x for each in held for x in each.tensors().values()]
        self.trace.states.append(hash(tuple(_bits(x) for x in tensors)))
        self.trace.histories.append(repr(stepper.step_state.state_dict()))
        if not all(bool(x.isfinite().all()) for x in tensors):
            self.trace.poisoned.append(iteration)


def _bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def poisoned(experiment: Experiment, plants: Sequence[Plant], rank: Rank | None = None) -> Trace:
    """Train with plants, and return what this rank observed, the error that ended it included."""
    rank = rank or Rank()
    experiment = replace(experiment, checkpoint=CheckpointConfig(every=1))
    poisoner = Poisoner(plants, rank.rank)

    def batches() -> Iterator[dict[str, Tensor]]:
        B, T = experiment.training.micro_batch_size, experiment.training.seq_length
        generator = torch.Generator().manual_seed(7 + rank.rank)
        while True:
            ids = torch.randint(0, 257, (B, T + 1), generator=generator)
            mask = torch.ones(B, T)
            mask[0, 0] = next((p.value for p in poisoner.active if p.kind == "loss"), 1.0)
            yield {
                "tokens": ids[:, :-1].contiguous(),
                "labels": ids[:, 1:].contiguous(),
                "loss_mask": mask,
                "position_ids": torch.arange(T).expand(B, T),
            }

    try:
        with session(experiment.training, rank) as device:
            train(experiment, batches(), poisoner, device, saver=poisoner)
    except RunError as error:
        poisoner.trace.error = str(error)
    return poisoner.trace


def main(job: Path) -> None:
    content = json.loads(job.read_text())
    experiment = compose(content["words"])
    rank = own_rank(experiment.launcher.num_processes)
    trace = poisoned(experiment, [Plant(**plant) for plant in content["plants"]], rank)
    job.with_name(f"rank{rank.rank}.json").write_text(json.dumps(asdict(trace)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
