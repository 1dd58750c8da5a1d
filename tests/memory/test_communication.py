"""Bytes that ranks send, by hand; and each kind of group by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from quantexp.config.compose import compose
from quantexp.memory.communication import communication_bytes
from quantexp.schema import Dispatcher, Experiment, ParallelConfig, Recompute

#: Llama 3.1 8B: tokens of a micro-batch, hidden size, layers, padded vocabulary, key and value width.
T, D, L, V, KV = 4096, 4096, 32, 128256, 2 * 8 * 128
#: A layer's parameters; those outside the layers are the embedding, the output layer and the last norm.
LAYER = (4096 + 2 * 1024) * D + 4096 * D + 3 * 14336 * D + 2 * D


@cache
def composed(model: str) -> Experiment:
    return compose([f"model={model}", "training.global_batch_size=16"], None, {})


def sent(
    processes: int,
    model: str = "llama31-8b",
    recompute: Recompute = Recompute.none,
    divided: bool | None = None,
    **sizes: object,
) -> dict[str, int]:
    base = composed(model)
    experiment = replace(
        base,
        parallel=ParallelConfig(**sizes),  # type: ignore[arg-type]
        launcher=replace(base.launcher, num_processes=processes),
        training=replace(base.training, recompute=recompute, distributed_optimizer=divided),
    )
    return communication_bytes(experiment)


def test_one_process_sends_nothing() -> None:
    assert sent(1) == {}


def test_data_parallel_ranks_send_their_gradients_and_their_share_of_the_weights() -> None:
    parameters = L * LAYER + 2 * V * D + D
    assert sent(4, divided=False) == {"data": parameters * 8 * 3 // 4}
    assert sent(4) == {"data": parameters * 6 * 3 // 4}


def test_tensor_parallel_ranks_send_every_layers_tokens() -> None:
    """16 micro-batches; half of what is gathered comes from the other rank."""
    each = T * D * 2 // 2
    layers, ends = 2 * L * (3 + 2) * each, (3 + 2) * each
    assert sent(2, tensor=2) == {"tensor": 16 * (layers + ends)}
    assert sent(2, tensor=2, sequence=False) == {"tensor": 16 * (2 * L * 4 + 4) * each}
    again = sent(2, tensor=2, recompute=Recompute.full)["tensor"] - 16 * (layers + ends)
    assert again == 16 * 2 * L * 2 * each


def test_context_parallel_ranks_gather_keys_and_values() -> None:
    """Each rank has a quarter of the tokens, sends its k and v to three, and reduces three gradients in float32."""
    one_way = L * 3 * (T // 4) * KV
    assert sent(4, context=4)["context"] == 16 * one_way * (2 + 4)
    for recompute in (Recompute.selective, Recompute.full):
        assert sent(4, context=4, recompute=recompute)["context"] == 16 * one_way * (2 * 2 + 4)


def test_stages_send_the_residual_forward_and_its_gradient_backward() -> None:
    one = T * D * 2
    assert sent(2, pipeline=2) == {"pipeline": 16 * one}
    assert sent(4, pipeline=4) == {"pipeline": 16 * 2 * one}
    assert sent(4, pipeline=4, virtual_pipeline=4)["pipeline"] == 16 * 8 * one
    assert sent(4, pipeline=2, tensor=2)["pipeline"] == 16 * one // 2, (
        "each rank has half of the tokens"
    )


def test_tied_embeddings_add_their_gradients_over_stages() -> None:
    hidden = 2048
    residual, embedding = 16 * T * hidden * 2, V * hidden * 4
    assert sent(2, "llama32-1b", pipeline=2) == {"pipeline": residual + embedding}


@pytest.mark.parametrize(
    ("dispatcher", "tokens"), [(Dispatcher.allgather, 7.0), (Dispatcher.alltoall, 6 * 7 / 8)]
)
def test_experts_receive_the_tokens_of_their_group_or_their_own(
    dispatcher: Dispatcher, tokens: float
) -> None:
    """26 layers with experts, to them and back, forward and backward; 2 of 16 micro-batches are this rank's."""
    one_way = tokens * T * 2048 * 2
    words = {"expert": 8, "dispatcher": dispatcher}
    assert sent(8, "deepseek2_lite", **words)["expert"] == 2 * 26 * 4 * one_way  # type: ignore[arg-type]
    again = sent(8, "deepseek2_lite", Recompute.full, **words)["expert"]  # type: ignore[arg-type]
    assert again == 2 * 26 * 6 * one_way


def test_ranks_that_share_an_expert_exchange_its_rows() -> None:
    """A rank has half of the tokens, and each of their six rows goes to the other rank too, half of them elsewhere."""
    rows = 6 * (T // 2) * 2048 * 2
    words = {"tensor": 2, "expert": 2, "expert_tensor": 2, "dispatcher": Dispatcher.alltoall}
    assert sent(4, "deepseek2_lite", **words)["expert"] == 8 * 26 * 4 * (rows // 2 + rows)  # type: ignore[arg-type]


def test_layers_without_shared_experts_share_attention_alone() -> None:
    base = composed("deepseek2_lite")
    moe = base.model.moe
    assert moe is not None
    without = replace(base.model, moe=replace(moe, num_shared_experts=0))
    launcher, parallel = replace(base.launcher, num_processes=2), ParallelConfig(tensor=2)
    both = [
        communication_bytes(replace(base, model=model, launcher=launcher, parallel=parallel))
        for model in (base.model, without)
    ]
    block = (3 + 2) * (T * 2048 * 2 // 2)
    assert both[0]["tensor"] - both[1]["tensor"] == 16 * 26 * block


def test_routed_experts_are_reduced_over_the_ranks_that_have_them() -> None:
    """All 8 ranks share the dense parameters; each expert is on one rank alone, with no one to reduce with."""
    base = composed("deepseek2_lite").model
    assert base.moe is not None
    sent_bytes = sent(8, "deepseek2_lite", expert=8)["data"]
    routed = 26 * 64 * 3 * 1408 * 2048
    dense = 15_706_484_224 - routed
    assert sent_bytes == dense * 6 * 7 // 8
