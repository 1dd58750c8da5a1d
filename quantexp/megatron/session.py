"""The process-wide state that a Megatron-Core run needs, for exactly as long as it lasts.

Process group, model-parallel groups, random-number tracker, determinism and, without CUDA, the CPU stand-ins: set up on
entering, taken down on leaving, so that the next run in the same process starts from nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import HashStore

from quantexp.megatron.cpu import cpu_device
from quantexp.schema import TrainingConfig


def is_deterministic(training: TrainingConfig) -> bool:
    """As configured; null means yes on a CPU, where it costs nothing, and no on a GPU."""
    if training.deterministic is None:
        return not torch.cuda.is_available()
    return training.deterministic


@contextlib.contextmanager
def session(training: TrainingConfig) -> Iterator[torch.device]:
    """Everything Megatron keeps globally, and the device to train on."""
    with cpu_device(), _determinism(is_deterministic(training)):
        device = _device()
        _initialise_process_group(device)
        try:
            parallel_state.initialize_model_parallel()
            torch.manual_seed(training.seed)
            tensor_parallel.model_parallel_cuda_manual_seed(training.seed)
            yield device
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _initialise_process_group(device: torch.device) -> None:
    """One process: a store in memory, so that no port is taken."""
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(minutes=10),
    )


@contextlib.contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory is part of the deterministic mode; no code here reads memory it has not written.
    deterministic: Any = torch.utils.deterministic
    filling = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = filling
        torch.use_deterministic_algorithms(before)
