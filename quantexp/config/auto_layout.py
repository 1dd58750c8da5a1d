"""Chooses the layout of an experiment (`parallel=auto`): every layout that runs, fits and is aligned, in order of cost.

    cost of a step = bytes sent within nodes / WITHIN + bytes sent between nodes / BETWEEN + idle share x compute time
    idle share     = (stages - 1) / (chunks x micro-batches)
    compute time   = FLOPs of a step / (processes x PRODUCTS)

The rates are those of one H100 with NVLink and a 400 Gb/s link, at the efficiency that large messages and products
reach; only their ratios matter. A group sends within a node if its ranks are neighbours in one. Tensor parallelism
between nodes is left out. Of equal costs the layout with less memory is first. Needs no torch. The number of processes,
where `launcher.num_processes=0` leaves it to the request and the layout, is chosen before (`config.completing`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantexp.config.validate.experiment import validate
from quantexp.config.validate.parallel import check_share_of_batch, validate_parallel
from quantexp.errors import ConfigError
from quantexp.memory.communication import communication_bytes
from quantexp.memory.footprint import fullest_rank
from quantexp.memory.room import Room, room_of
from quantexp.model.layout import Layout
from quantexp.model.sizes import flops_per_iteration, num_micro_batches_each
from quantexp.quant.alignment import kinds_of_modules, misalignments
from quantexp.quant.precision import PrecisionMap, declared_maps
from quantexp.schema import Experiment, ParallelConfig
from quantexp.schema.limits import check_limits

#: Bytes per second of one rank within a node and between nodes, and FLOPs per second.
WITHIN, BETWEEN, PRODUCTS = 200e9, 25e9, 400e12
#: GPUs of a node at most, where the launcher does not say how many.
_GPUS = 8
#: The shipped choice.
NAME = "auto"
#: Chunks of layers per stage that are tried.
_CHUNKS = (1, 2, 4)


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    parallel: ParallelConfig
    #: Of the fullest rank, in units of 1e9 bytes.
    memory_gb: float
    #: Kind of group -> the most bytes that a rank sends in a step.
    communication_bytes: dict[str, int]
    #: The share of a step that stages idle.
    idle: float
    #: Seconds of a step, by the rates above, that ranks send or idle.
    cost_s: float


def with_layout(experiment: Experiment) -> Experiment:
    """The experiment of `parallel=auto` with the first of its `candidates`; `parallel.auto` is then false.

    Raises:
        ConfigError: any other key is invalid, a size is set too, the memory of a process is unknown, or no layout fits.
    """
    validate(_in_one_process(experiment))
    check_limits("launcher", experiment.launcher)
    _refuse_sizes(experiment.parallel)
    return dataclasses.replace(experiment, parallel=candidates(experiment)[0].parallel)


def _in_one_process(experiment: Experiment) -> Experiment:
    """The experiment without its layout, for the checks of everything else before a layout is chosen."""
    launcher = dataclasses.replace(
        experiment.launcher, num_processes=1, nodes=1, gpus_per_node=0, gpu_type=None
    )
    return dataclasses.replace(experiment, parallel=ParallelConfig(), launcher=launcher)


def is_chosen(parallel: ParallelConfig) -> bool:
    """Whether `with_layout` chose the sizes of the shipped choice."""
    return parallel.name == NAME and not parallel.auto


def candidates(experiment: Experiment) -> list[Candidate]:
    """The layouts that run, fit and are aligned, the cheapest first; at least one.

    Raises:
        ConfigError: the memory of a process is unknown, or no layout fits.
    """
    room = room_of(experiment)
    if room is None:
        raise ConfigError(
            "parallel=auto needs the memory of each process, which the request does not state; give memory=80 (GB)"
        )
    maps = declared_maps(experiment.model, experiment.quant)
    fitting, smallest = [], math.inf
    for possible in _possible(experiment, maps):
        memory_gb = fullest_rank(possible, maps).gb
        smallest = min(smallest, memory_gb)
        if memory_gb <= room.gb:
            fitting.append(_candidate(possible, memory_gb))
    if not fitting:
        raise ConfigError(_nothing_fits(experiment, room, smallest))
    return sorted(fitting, key=lambda one: (one.cost_s, one.memory_gb))


def _refuse_sizes(parallel: ParallelConfig) -> None:
    plain = ParallelConfig()
    for key in (
        "tensor",
        "sequence",
        "pipeline",
        "virtual_pipeline",
        "expert",
        "expert_tensor",
        "context",
    ):
        if (value := getattr(parallel, key)) != getattr(plain, key):
            raise ConfigError(
                f"parallel.{key} follows from parallel=auto and cannot be set, got {value}; drop one of them"
            )


def _nothing_fits(experiment: Experiment, room: Room, smallest: float) -> str:
    processes = experiment.launcher.num_processes
    if smallest == math.inf:
        return (
            f"parallel=auto: no layout of {processes} processes runs {experiment.model.name} with aligned blocks and "
            f"training.global_batch_size={experiment.training.global_batch_size}; choose another "
            "launcher.num_processes or batch"
        )
    return (
        f"parallel=auto: no layout of launcher.num_processes={processes} fits in {room.gb:.1f} GB ({room.source}), the "
        f"smallest takes {smallest:.1f} GB; take more processes, or training.recompute=full, training.attention=tiled "
        "or training.weight_cache=false"
    )


def _possible(experiment: Experiment, maps: Sequence[PrecisionMap]) -> Iterator[Experiment]:
    """The experiment in every layout that runs with the blocks of one process."""
    kinds = kinds_of_modules(experiment.model, maps)
    aligned: dict[tuple[int, int, int], bool] = {}
    for parallel in _layouts(experiment):
        possible = dataclasses.replace(experiment, parallel=parallel)
        try:
            validate_parallel(possible)
            check_share_of_batch(possible)
        except ConfigError:
            continue
        layout = Layout.of(possible)
        sizes = layout.tensor, layout.context, layout.expert_tensor
        if sizes not in aligned:
            unaligned = misalignments(kinds, layout, experiment.training.seq_length)
            aligned[sizes] = not unaligned
        if aligned[sizes]:
            yield possible


def _layouts(experiment: Experiment) -> Iterator[ParallelConfig]:
    """Sizes whose product divides the processes; tensor-parallel groups lie within a node."""
    model, processes = experiment.model, experiment.launcher.num_processes
    experts = [1] if model.moe is None else _divisors(model.moe.num_experts)
    for tensor in _divisors(_per_node(experiment)):
        for pipeline in _divisors(processes // tensor):
            for context in _divisors(processes // tensor // pipeline):
                for expert in experts:
                    for chunks in _CHUNKS if pipeline > 1 else (1,):
                        yield dataclasses.replace(
                            experiment.parallel,
                            auto=False,
                            tensor=tensor,
                            pipeline=pipeline,
                            context=context,
                            expert=expert,
                            virtual_pipeline=chunks,
                        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _per_node(experiment: Experiment) -> int:
    launcher = experiment.launcher
    return launcher.gpus_per_node or math.gcd(launcher.num_processes // launcher.nodes, _GPUS)


def _candidate(experiment: Experiment, memory_gb: float) -> Candidate:
    layout, training = Layout.of(experiment), experiment.training
    sent = communication_bytes(experiment)
    micro_batches = num_micro_batches_each(experiment)
    idle = (layout.pipeline - 1) / (layout.chunks * micro_batches)
    flop = flops_per_iteration(experiment.model, training.seq_length, training.global_batch_size)
    cost_s = idle * flop / (layout.num_processes * PRODUCTS)
    spans = {
        "tensor": layout.tensor,
        "context": layout.tensor * layout.context,
        "expert": layout.expert * layout.expert_tensor,
        "pipeline": layout.num_processes,
        "data": layout.num_processes // layout.pipeline,
    }
    per_node = _per_node(experiment)
    for kind, num_bytes in sent.items():
        cost_s += num_bytes / (WITHIN if per_node % spans[kind] == 0 else BETWEEN)
    return Candidate(experiment.parallel, memory_gb, sent, idle, cost_s)
