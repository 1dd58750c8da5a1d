"""The process-wide state of a Megatron-Core run.

It comprises process group, model-parallel groups, random-number tracker, gradient norm, the precision of products and
determinism. Without CUDA it also comprises the CPU stand-ins and, if a rank's processor needs them, 16-bit products
computed through fp32. `session` sets everything up and tears it down, so that the next run in the same process starts
from a clean state.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from quantexp.formats.torch_internals import FileStore, HashStore, PrefixStore, TCPStore
from quantexp.model.layout import Layout
from quantexp.quant.products import go_through_fp32, through_fp32
from quantexp.runs.device import multiplies_natively
from quantexp.runs.ranks import RENDEZVOUS, Rank
from quantexp.schema import Precision, TrainingConfig
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.cpu import cpu_device
from quantexp.training.megatron.grad_norm import same_norm_in_every_layout
from quantexp.training.megatron.transformer_config import DTYPES


def is_deterministic(training: TrainingConfig) -> bool:
    """Whether determinism is on; if not configured, on for a CPU, where it is free, and off for a GPU."""
    if training.deterministic is None:
        return not torch.cuda.is_available()
    return training.deterministic


@contextlib.contextmanager
def session(
    training: TrainingConfig,
    rank: Rank | None = None,
    timeout_min: float = 10.0,
    layout: Layout | None = None,
) -> Iterator[torch.device]:
    """Set up Megatron's global state and yield the device to train on.

    Args:
        training: seed and determinism; all ranks have the same seed and therefore the same initial weights.
        rank: this process's rank; None means the only one.
        timeout_min: minutes after which waiting for another rank is an error.
        layout: how the model lies on the ranks; None means that each holds the whole model.
    """
    # What deterministic products need; read at a process's first product, which may belong to an earlier session.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rank = rank or Rank()
    layout = layout or Layout(data=rank.world_size)
    with (
        cpu_device(),
        same_norm_in_every_layout(),
        _determinism(is_deterministic(training)),
        _sums_in_float32(),
    ):
        device = _device(rank)
        _initialise_process_group(device, rank, timedelta(minutes=timeout_min))
        with _groups_destroyed():
            _initialise_model_parallel(layout, timeout_min)
            torch.manual_seed(training.seed)
            tensor_parallel.model_parallel_cuda_manual_seed(training.seed)
            with through_fp32(_dtypes_without_kernels(training, device)):
                yield device


@contextlib.contextmanager
def _groups_destroyed() -> Iterator[None]:
    """Destroy the process groups at the end.

    Not after an error where NCCL connects several ranks: its destruction waits for the others, which may wait for this
    one in a collective, so that the error would not be recorded. The process has to end then, as a worker does.
    """
    try:
        yield
    except BaseException:
        if torch.distributed.get_backend() != "nccl" or torch.distributed.get_world_size() == 1:
            _destroy_groups()
        raise
    _destroy_groups()


def _destroy_groups() -> None:
    # Its cache keeps the embeddings of the last 32 models, each with a process group and its threads.
    RotaryEmbedding.forward.cache_clear()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _sums_in_float32() -> Iterator[None]:
    """Products sum in float32 on a GPU, too, and float32 operands are not rounded to TF32.

    By default cuBLAS adds the parts of a 16-bit product in 16 bits where it splits the sum over K, and NVIDIA's
    containers turn TF32 on (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE).
    """
    matmul: Any = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    precision, before = torch.get_float32_matmul_precision(), [getattr(matmul, n) for n in names]
    torch.set_float32_matmul_precision("highest")
    for name in names:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


def _initialise_model_parallel(layout: Layout, timeout_min: float) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=timeout_min,
    )


def products_of(training: TrainingConfig, device: torch.device) -> str | None:
    """How a CPU computes the run's 16-bit products inside `session`: `fp32` or `native`; None for other products."""
    if device.type != "cpu" or training.precision is Precision.fp32:
        return None
    return "fp32" if go_through_fp32(DTYPES[training.precision]) else "native"


def _dtypes_without_kernels(training: TrainingConfig, device: torch.device) -> list[torch.dtype]:
    """The working dtype, if it has 16 bits and any rank's processor lacks a kernel for its products."""
    if device.type != "cpu" or training.precision is Precision.fp32:
        return []
    everywhere = all(gather(multiplies_natively(training.precision)))
    return [] if everywhere else [DTYPES[training.precision]]


def _device(rank: Rank) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank.local_rank)
    return torch.device("cuda", rank.local_rank)


def _initialise_process_group(device: torch.device, rank: Rank, timeout: timedelta) -> None:
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=HashStore() if rank.alone else _shared_store(rank, timeout),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timeout,
        # Else NCCL guesses a device at the first barrier, and says so.
        device_id=device if device.type == "cuda" else None,
    )


def _shared_store(rank: Rank, timeout: timedelta) -> TCPStore:
    """The ranks' rendezvous store at MASTER_ADDR:MASTER_PORT.

    Rank 0 listens at that address only; by default the store would listen at every address of the machine. If torchrun
    already listens there (its default), every rank only connects. If RENDEZVOUS names a file, rank 0 writes there at
    which free port it listens: another program may have taken the one that torchrun found some seconds ago.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank.leads and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    file = os.environ.get(RENDEZVOUS)
    listener = socket.create_server((host, 0 if file else port)) if hosts else None
    if file:
        ports = PrefixStore("ranks", FileStore(file))
        ports.set_timeout(timeout)
        if listener is not None:
            ports.set("port", str(listener.getsockname()[1]))
        port = int(ports.get("port"))
    fd = None if listener is None else listener.detach()
    return TCPStore(host, port, rank.world_size, hosts, timeout, master_listen_fd=fd)


@contextlib.contextmanager
def _determinism(enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    # Deterministic mode also fills new memory, which is unnecessary: no code here reads uninitialised memory.
    deterministic: Any = torch.utils.deterministic
    fills_memory = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = fills_memory
        torch.use_deterministic_algorithms(before)
