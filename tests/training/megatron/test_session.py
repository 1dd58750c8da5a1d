"""A session frees everything of its run, and restores the settings of torch that it changes."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from quantexp.runs.ranks import RENDEZVOUS, Rank
from quantexp.schema import Experiment
from quantexp.training.megatron.session import _shared_store, session


def test_rotary_embedding_is_freed_with_its_process_group(
    tiny: Callable[..., Experiment],
) -> None:
    """Megatron's cache of embedding outputs also references the embedding."""
    with session(tiny().training):
        embedding = RotaryEmbedding(32, 1.0, use_cpu_initialization=True)
        assert isinstance(embedding(8), torch.Tensor)
        freed = weakref.ref(embedding)
        del embedding
        assert freed() is not None, "cached"
    gc.collect()
    assert freed() is None


@pytest.fixture
def of_a_container() -> Iterator[None]:
    """The precision of products in a container of NVIDIA, which differs from torch's default."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("of_a_container")
def test_products_sum_in_float32_inside_and_as_before_outside(
    tiny: Callable[..., Experiment],
) -> None:
    def precisions() -> tuple[str, bool, bool]:
        matmul = torch.backends.cuda.matmul
        return (
            torch.get_float32_matmul_precision(),
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
        )

    with session(tiny().training):
        assert precisions() == ("highest", False, False)
    assert precisions() == ("high", True, True)


@pytest.mark.parametrize(
    ("backend", "num_ranks", "is_left"),
    [("nccl", 2, True), ("nccl", 1, False), ("gloo", 2, False)],
)
def test_after_an_error_only_groups_of_several_nccl_ranks_are_left_to_the_end_of_the_process(
    tiny: Callable[..., Experiment],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    num_ranks: int,
    is_left: bool,
) -> None:
    def fail_in_session() -> None:
        with session(tiny().training):
            monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
            monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_ranks)
            raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            fail_in_session()
        assert torch.distributed.is_initialized() == is_left
    finally:
        monkeypatch.undo()
        if torch.distributed.is_initialized():
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def test_without_an_error_all_groups_are_destroyed(
    tiny: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    with session(tiny().training):
        monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not torch.distributed.is_initialized()


def test_ranks_of_one_machine_meet_where_another_program_has_taken_torchruns_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor() as ranks, socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        monkeypatch.setenv(RENDEZVOUS, str(tmp_path / "rendezvous"))

        def met(rank: int) -> tuple[bytes, object]:
            """What the other rank said, and the store, which must outlast its answers to that rank."""
            store = _shared_store(Rank(rank, 2, rank), timedelta(seconds=60))
            store.set(str(rank), "here")
            return store.get(str(1 - rank)), store

        second, first = (ranks.submit(met, rank) for rank in (1, 0))
        assert [first.result()[0], second.result()[0]] == [b"here", b"here"]
