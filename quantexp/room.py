"""Whether a run fits in the memory there is, and what would make it fit: from the configuration alone."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import psutil

from quantexp.device import device_class
from quantexp.errors import ConfigError
from quantexp.footprint import memory_parts_gb
from quantexp.quant.fusable import require_fused_attention
from quantexp.quant.precision import PrecisionMap, declared_maps
from quantexp.schema import (
    AttentionPath,
    Experiment,
    LauncherKind,
    Recompute,
)


def room_gb(experiment: Experiment) -> float | None:
    """What a process may have on this machine, in units of 1e9 bytes; None where a job is to run elsewhere.

    A GPU's memory, or without one an equal share of the machine's.
    """
    if experiment.launcher.kind is LauncherKind.slurm:
        return None
    if device_class(experiment.launcher) == "cpu":
        return psutil.virtual_memory().total / experiment.launcher.num_processes / 1e9
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) / 1e9


def way_to_fit(
    experiment: Experiment, room: float, maps: Sequence[PrecisionMap] | None = None
) -> str | None:
    """What to change so that a run fits, as the words that do it; None where it does as it is.

    Tried are quantised weights that are not kept, fused attention (in tiles, where the scheme forbids that),
    recomputation and a micro-batch of one sequence, each alone, then one on top of the other, then fewer layers beside
    all of them.
    """
    maps = declared_maps(experiment.model, experiment.quant) if maps is None else maps
    parts = memory_parts_gb(experiment, maps)
    needed = sum(parts.values())
    if needed <= room:
        return None
    begins = f"{needed:.1f} GB do not fit in {room:.1f} GB"
    ways = list(_ways(experiment, has_copies=parts["weight_copies"] > 0))
    for key, value in ways:
        if (total := _total_gb(_with(experiment, key, value), maps)) <= room:
            return f"{begins}: {_word(key, value)} takes {total:.1f} GB"
    together: list[str] = []
    for key, value in ways:
        together.append(_word(key, value))
        experiment = _with(experiment, key, value)
        if (total := _total_gb(experiment, maps)) <= room:
            return f"{begins}: {' '.join(together)} takes {total:.1f} GB"
    fewer = range(1, experiment.model.num_layers)
    fitting = bisect_right(fewer, room, key=lambda n: _total_gb(_with_layers(experiment, n)))
    if fitting:
        total = _total_gb(_with_layers(experiment, fitting))
        words = " ".join([*together, f"model.num_layers={fitting}"])
        return f"{begins}: {words} takes {total:.1f} GB"
    least = f"still takes {_total_gb(_with_layers(experiment, 1)):.1f} GB"
    return f"{begins}: {' '.join([*together, 'model.num_layers=1'])} {least}; take a smaller model or another machine"


def _total_gb(experiment: Experiment, maps: Sequence[PrecisionMap] | None = None) -> float:
    return sum(memory_parts_gb(experiment, maps).values())


def _with(experiment: Experiment, key: str, value: Any) -> Experiment:
    training = dataclasses.replace(experiment.training, **{key: value})
    return dataclasses.replace(experiment, training=training)


def _with_layers(experiment: Experiment, num_layers: int) -> Experiment:
    model = dataclasses.replace(experiment.model, num_layers=num_layers)
    return dataclasses.replace(experiment, model=model)


def _ways(experiment: Experiment, *, has_copies: bool) -> Iterator[tuple[str, Any]]:
    """Keys of the training and their values that take less memory."""
    training = experiment.training
    if has_copies:
        yield "weight_cache", False
    if training.attention is AttentionPath.plain:
        fusable = _is_fusable(experiment)
        yield "attention", AttentionPath.fused if fusable else AttentionPath.tiled
    if training.recompute is Recompute.none:
        yield "recompute", Recompute.full
    if training.micro_batch_size > 1:
        yield "micro_batch_size", 1


def _word(key: str, value: Any) -> str:
    shown = value.value if isinstance(value, Enum) else str(value).lower()
    return f"training.{key}={shown}"


def _is_fusable(experiment: Experiment) -> bool:
    try:
        require_fused_attention(experiment.model, experiment.quant)
    except ConfigError:
        return False
    return True
