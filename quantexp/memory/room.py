"""Whether a run fits in the available memory, and what would make it fit: from the configuration alone.

All advice is computed: each suggestion was applied to the configuration, and the prediction of
`quantexp.memory.footprint` for the result fits.
"""

from __future__ import annotations

import dataclasses
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from quantexp.errors import ConfigError, RunError, TooLargeError
from quantexp.memory.footprint import memory_parts_gb
from quantexp.processes.machine import host_memory_gb
from quantexp.quant.attention.fusable import require_fused_attention
from quantexp.quant.precision import PrecisionMap, declared_maps
from quantexp.runs.device import device_class
from quantexp.schema import (
    AttentionPath,
    Experiment,
    LauncherConfig,
    Precision,
    Recompute,
)

#: The end of every refusal.
STARTED_ANYWAY = "memory=ignore starts {} anyway"
#: Words in a GPU's name and its memory according to NVIDIA's data sheets, in units of 2^30 bytes. For models with two
#: sizes it is the larger: a refused run must not fit in either.
_GPU_MEMORY = {
    **{"gb200": 192, "b200": 192, "gh200": 144, "h200": 141, "h100": 96, "a100": 80},
    **{"l40s": 48, "l40": 48, "l4": 24, "a10": 24, "v100": 32, "t4": 16},
}
#: A size within a GPU's name: a100_80gb, or 1g.10gb for a part of one.
_SIZE_IN_NAME = re.compile(r"(\d+)gb(?![a-z0-9])")
#: `capture.queue_gb` below which the advice does not reduce a capture.
_SMALL_QUEUE_GB = 0.1
#: The shortest suggested sequence length.
_SHORTEST = 128


@dataclass(frozen=True)
class Room:
    """The memory available to each process of a run."""

    #: In units of 1e9 bytes.
    gb: float
    #: Where the limit comes from: "this machine", "launcher.mem_gb=16".
    source: str


@dataclass(frozen=True)
class Misfit:
    """A run whose processes need more memory than is available."""

    needed_gb: float
    room: Room
    #: Suggestions that make it fit; if nothing does, what is still needed.
    ways: tuple[str, ...]

    def __str__(self) -> str:
        problem = (
            f"{self.needed_gb:.1f} GB do not fit in {self.room.gb:.1f} GB ({self.room.source})"
        )
        return f"{problem}: {', or '.join(self.ways)}"


def never() -> None:
    """The run under `training=fast`, where the caller cannot compose it."""
    return


def room_of(experiment: Experiment) -> Room | None:
    """The memory of each process: as configured, this machine's, or the job request's; None if nothing states it.

    Without GPUs it is an equal share of a machine's memory.
    """
    if (gb := experiment.memory_gb) is not None:
        return Room(gb, f"memory={gb:g}")
    if not experiment.launcher.is_local:
        return _requested(experiment.launcher)
    return room_here(experiment)


def room_here(experiment: Experiment) -> Room:
    """The memory of each process on the current machine, regardless of the request.

    Raises:
        RunError: a job requested GPUs, and its node has none.
    """
    launcher = experiment.launcher
    if device_class(launcher) == "cpu":
        return _share("this machine", host_memory_gb(), launcher)
    import torch

    indices = range(min(_processes_of_a_node(launcher), torch.cuda.device_count()))
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in indices]
    if not sizes:
        raise RunError(
            f"launcher.gpus_per_node={launcher.gpus_per_node} was requested, and this node shows no GPU: run "
            "quantexp doctor there, or choose other nodes (launcher.partition), or its CPU (launcher.gpus_per_node=0)"
        )
    return Room(min(sizes) / 1e9, f"its {torch.cuda.get_device_name(0)}")


def needed_gb(experiment: Experiment, maps: Sequence[PrecisionMap] | None = None) -> float:
    """The predicted memory of each process, in units of 1e9 bytes."""
    return sum(memory_parts_gb(experiment, maps).values())


def fits(
    experiment: Experiment, room: Room | None, maps: Sequence[PrecisionMap] | None = None
) -> bool:
    """Whether the run fits; True if the available memory is unknown."""
    return room is None or needed_gb(experiment, maps) <= room.gb


def misfit(
    experiment: Experiment,
    room: Room | None,
    maps: Sequence[PrecisionMap] | None = None,
    fast: Callable[[], Experiment | None] = never,
) -> Misfit | None:
    """The changes that make a run fit; None if it fits, or if the available memory is unknown.

    Candidates are a shorter queue of captured tensors, saving without a copy, no weight cache, fused attention (or
    tiled, where the scheme forbids that), recomputation, a micro-batch of one sequence and bf16, each alone, then
    cumulatively, then with a shorter sequence, or fewer layers, in addition to all of them. Further candidates are
    fewer processes, a larger request of memory, and the quick test.

    Args:
        experiment: the run.
        room: the memory available to each of its processes.
        maps: the experiment's `declared_maps`.
        fast: composes the same run under `training=fast`.
    """
    if room is None:
        return None
    maps = declared_maps(experiment.model, experiment.quant) if maps is None else maps
    if fits(experiment, room, maps):
        return None
    needed = needed_gb(experiment, maps)
    ways = [
        *_changes_that_fit(experiment, room.gb, maps),
        *_launches_that_fit(experiment, room.gb, needed, maps),
        *_quick_test(experiment, room.gb, fast),
    ]
    return Misfit(needed, room, tuple(ways) or (_least(experiment, maps),))


def _requested(launcher: LauncherConfig) -> Room | None:
    if launcher.gpus_per_node:
        size = None if launcher.gpu_type is None else _gpu_memory_gb(launcher.gpu_type)
        return None if size is None else Room(size, f"launcher.gpu_type={launcher.gpu_type}")
    if not launcher.mem_gb:  # 0 is all of a node, whose size is not known here
        return None
    return _share(f"launcher.mem_gb={launcher.mem_gb:g}", launcher.mem_gb, launcher)


def _gpu_memory_gb(gpu_type: str) -> float | None:
    name = gpu_type.lower()
    sizes = [int(size) for size in _SIZE_IN_NAME.findall(name)]
    sizes += [_GPU_MEMORY[word] for word in re.split(r"[^a-z0-9]+", name) if word in _GPU_MEMORY]
    return sizes[0] * 2**30 / 1e9 if sizes else None


def _share(source: str, gb: float, launcher: LauncherConfig) -> Room:
    number = _processes_of_a_node(launcher)
    if number == 1:
        return Room(gb, source)
    return Room(gb / number, f"{source}, for each of {number} processes")


def _processes_of_a_node(launcher: LauncherConfig) -> int:
    return launcher.num_processes // launcher.nodes


def _changes_that_fit(
    experiment: Experiment, room: float, maps: Sequence[PrecisionMap]
) -> Iterator[str]:
    """One sufficient change of the run, or several combined; if they do not suffice, with a shorter sequence, and with
    fewer layers.
    """
    changes = list(_changes(experiment, maps))
    alone = [[change] for change in changes]
    together = [changes[:number] for number in range(2, len(changes) + 1)]
    for combination in (*alone, *together):
        if (total := needed_gb(_with(experiment, *combination), maps)) <= room:
            yield _takes(combination, total)
            return
    experiment = _with(experiment, *changes)
    length = experiment.training.seq_length // 2
    if experiment.training.start_from is not None:
        length = 0  # its position in the data is counted in sequences of that run's length
    while length >= _SHORTEST:
        change = ("training", "seq_length", length)
        if (total := needed_gb(_with(experiment, change), maps)) <= room:
            yield _takes([*changes, change], total)
            break
        length //= 2
    fewer = range(_fewest_layers(experiment), experiment.model.num_layers)
    fitting = bisect_right(fewer, room, key=lambda n: needed_gb(_with(experiment, _layers(n))))
    if fitting:
        change = _layers(fewer[fitting - 1])
        yield _takes([*changes, change], needed_gb(_with(experiment, change)))


#: Section, key and value.
_Change = tuple[str, str, Any]


def _changes(experiment: Experiment, maps: Sequence[PrecisionMap]) -> Iterator[_Change]:
    """Keys with values that need less memory; those with the least effect on the run's numbers first."""
    training, parts = experiment.training, memory_parts_gb(experiment, maps)
    if parts["capture"] > _SMALL_QUEUE_GB:
        yield "capture", "queue_gb", _SMALL_QUEUE_GB
    if parts["checkpoint"] > 0:
        yield "checkpoint", "asynchronous", False
    if parts["weight_copies"] > 0:
        yield "training", "weight_cache", False
    if training.attention is AttentionPath.plain:
        path = AttentionPath.fused if _is_fusable(experiment) else AttentionPath.tiled
        yield "training", "attention", path
    if training.recompute is not Recompute.full:
        yield "training", "recompute", Recompute.full
    if training.micro_batch_size > 1:
        yield "training", "micro_batch_size", 1
    if training.precision is Precision.fp32:
        yield "training", "precision", Precision.bf16


def _launches_that_fit(
    experiment: Experiment, room: float, needed: float, maps: Sequence[PrecisionMap]
) -> Iterator[str]:
    """Fewer processes on this machine, or a larger request of a job."""
    launcher = experiment.launcher
    if device_class(launcher) != "cpu":
        return
    number = launcher.num_processes
    if not launcher.is_local:
        whole = math.ceil(needed * _processes_of_a_node(launcher))
        yield f"launcher.mem_gb={whole} requests enough"
        return
    for fewer in range(number - 1, 0, -1):
        if number % fewer == 0:
            change = ("launcher", "num_processes", fewer)
            total = needed_gb(_with(experiment, change), maps)
            if total * fewer <= room * number:
                yield _takes([change], total)
                return


def _quick_test(
    experiment: Experiment, room: float, fast: Callable[[], Experiment | None]
) -> Iterator[str]:
    """The preset that makes any model small, unless it is already active or initial weights rule it out."""
    has_weights = experiment.model.init_from or experiment.training.start_from
    if experiment.training.name == "fast" or has_weights:
        return
    quick = fast()
    if quick is not None and (total := needed_gb(quick)) <= room:
        yield f"training=fast (the quick test) takes {total:.1f} GB"


def _least(experiment: Experiment, maps: Sequence[PrecisionMap]) -> str:
    """The memory that the run needs after all candidate changes."""
    changes = list(_changes(experiment, maps))
    if (fewest := _fewest_layers(experiment)) < experiment.model.num_layers:
        changes.append(_layers(fewest))
    if not changes:
        return "take a smaller model or another machine"
    total = needed_gb(_with(experiment, *changes))
    return f"{' '.join(map(_word, changes))} still takes {total:.1f} GB; take a smaller model or another machine"


def _fewest_layers(experiment: Experiment) -> int:
    """The smallest allowed depth: with every layer that a rule names, and all layers of initial weights."""
    model = experiment.model
    if model.init_from is not None or experiment.training.start_from is not None:
        return model.num_layers
    layers = [
        *(layer for rule in experiment.quant.rules for layer in rule.layers),
        *(layer for rule in experiment.capture.rules for layer in rule.layers),
    ]
    routed = 0 if model.moe is None else min(model.moe.num_dense_layers + 1, model.num_layers)
    return max(1, routed, *(layer + 1 if layer >= 0 else -layer for layer in layers))


def _takes(changes: Sequence[_Change], total: float) -> str:
    return f"{' '.join(map(_word, changes))} takes {total:.1f} GB"


def _with(experiment: Experiment, *changes: _Change) -> Experiment:
    for section, key, value in changes:
        changed = dataclasses.replace(getattr(experiment, section), **{key: value})
        experiment = dataclasses.replace(experiment, **{section: changed})
    return experiment


def _layers(number: int) -> _Change:
    return "model", "num_layers", number


def _word(change: _Change) -> str:
    section, key, value = change
    shown = value.value if isinstance(value, Enum) else str(value).lower()
    return f"{section}.{key}={shown}"


def _is_fusable(experiment: Experiment) -> bool:
    try:
        require_fused_attention(experiment.model, experiment.quant)
    except ConfigError:
        return False
    return True


def require_memory_here(experiment: Experiment) -> None:
    """Refuse a run whose process does not fit on the machine where it just started.

    Raises:
        TooLargeError: names the changes that would make it fit.
    """
    if not experiment.checks_memory:
        return
    room = room_here(experiment) if experiment.memory_gb is None else room_of(experiment)
    if fit := misfit(experiment, room):
        raise TooLargeError(f"{fit}; {STARTED_ANYWAY.format('it')}")
