"""The memory that `plan` shows for a ring is what the ring takes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantexp.extras.forensics import dossiers
from quantexp.extras.forensics.ring.price import TENSOR_BYTES, ring_bytes
from quantexp.extras.forensics.ring.store import RingStore
from quantexp.quant.precision import precision_map
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

#: Of a tensor's storage, and of its allocation beside it.
_STORAGE = 160


def held_bytes(thing: Any, seen: set[int]) -> int:
    """The bytes of an object and all that it refers to, each counted once."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return sys.getsizeof(thing) + thing.numel() * thing.element_size() + _STORAGE
    parts: list[Any] = []
    if isinstance(thing, dict):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        parts = list(thing)
    elif not isinstance(thing, type) and type(thing).__module__.startswith("quantexp"):
        parts = [vars(thing)] if hasattr(thing, "__dict__") else []
    elif getattr(thing, "__closure__", None):
        parts = [cell.cell_contents for cell in thing.__closure__]
    return sys.getsizeof(thing) + sum(held_bytes(part, seen) for part in parts)


def test_ring_takes_what_plan_shows(
    run_tiny: Callable[..., RunDir],
    tiny: Callable[..., Experiment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores: list[RingStore] = []
    end = dossiers.Dossiers.close

    def close(self: dossiers.Dossiers) -> None:
        assert self.recorder is not None
        stores.append(self.recorder.store)
        end(self)

    monkeypatch.setattr(dossiers.Dossiers, "close", close)
    words = ["quant=FA_linear_mxfp4", "capture=off", "capture.ring=8", "training.iterations=10"]
    run_tiny(*words)
    (store,) = stores
    number = sum(len(iteration.tensors) for iteration in store.iterations)
    experiment = tiny(*words)
    declared = precision_map(experiment.model, experiment.quant)
    training = experiment.training
    tokens = 8 * training.global_batch_size * training.seq_length * 8
    assert ring_bytes(experiment, declared) == number * TENSOR_BYTES + tokens
    # Formats with blocks have the most numbers: their scales' exponents.
    measured = held_bytes(store.iterations, set()) / number
    assert TENSOR_BYTES / 2 < measured < TENSOR_BYTES


def test_no_ring_takes_nothing(tiny: Callable[..., Experiment]) -> None:
    experiment = tiny("capture=stats")
    assert ring_bytes(experiment, precision_map(experiment.model, experiment.quant)) == 0
