"""Every refusal of a layout, by its message; and layouts that pass."""

from __future__ import annotations

import copy
from enum import Enum
from functools import cache

import pytest
import yaml
from megatron.core.transformer.transformer_config import TransformerConfig

from quantexp.config.compose import compose
from quantexp.config.validate.experiment import validate
from quantexp.errors import ConfigError
from quantexp.model.layout import Layout
from quantexp.schema import Experiment

LLAMA = ("model=llama32-1b", "training.global_batch_size=16", "training.micro_batch_size=1")
EXPERTS = ("model=deepseek2_lite", *LLAMA[1:])


@cache
def shipped(model: str) -> Experiment:
    return compose([model, *LLAMA[1:]], None, {})


def validated(model: str, *words: str) -> Experiment:
    """A shipped model's experiment with these keys, validated; composing each anew would take a second."""
    experiment = copy.deepcopy(shipped(model))
    for word in words:
        key, _, text = word.partition("=")
        section, name = key.rsplit(".", 1)
        owner: object = experiment
        for part in section.split("."):
            owner = getattr(owner, part)
        value, before = yaml.safe_load(text), getattr(owner, name)
        setattr(owner, name, type(before)[value] if isinstance(before, Enum) else value)
    validate(experiment)
    return experiment


def refusal(model: str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validated(model, *words)
    return str(caught.value)


def parallel(**sizes: object) -> list[str]:
    """The words of a layout, with as many processes as it needs if none are named."""
    processes = sizes.pop("processes", None)
    if processes is None:
        product = 1
        for key in ("tensor", "context", "pipeline"):
            product *= int(str(sizes.get(key, 1)))
        processes = max(product, int(str(sizes.get("expert", 1))))
    return [
        f"launcher.num_processes={processes}",
        *(f"parallel.{key}={value}" for key, value in sizes.items()),
    ]


CASES: list[tuple[tuple[str, ...], dict[str, object], str]] = [
    (LLAMA, {"tensor": 0}, "parallel.tensor must be at least 1, got 0"),
    (
        LLAMA,
        {"sequence": "true"},
        "parallel.sequence=true needs parallel.tensor above 1, got 1; drop it",
    ),
    (
        EXPERTS,
        {"tensor": 2, "sequence": "false"},
        "parallel.sequence must be true with experts (model.moe) and parallel.tensor=2, got false; drop it",
    ),
    (
        LLAMA,
        {"virtual_pipeline": 2},
        "parallel.virtual_pipeline=2 needs parallel.pipeline above 1, got 1; drop it",
    ),
    (
        LLAMA,
        {"expert": 2},
        "parallel.expert=2 needs a model with experts (model.moe), and llama32-1b has none; drop it",
    ),
    (
        LLAMA,
        {"expert_tensor": 1},
        "parallel.expert_tensor=1 needs a model with experts (model.moe), and llama32-1b has none; drop it",
    ),
    (
        LLAMA,
        {"dispatcher": "alltoall"},
        "parallel.dispatcher=alltoall needs a model with experts (model.moe), and llama32-1b has none; drop it",
    ),
    (
        EXPERTS,
        {"tensor": 2, "expert_tensor": 1},
        "parallel.expert_tensor must be parallel.tensor=2 with parallel.expert=1, because the gradients of the experts "
        "would not be summed, got 1; drop it, or take parallel.expert above 1",
    ),
    (
        EXPERTS,
        {"dispatcher": "alltoall"},
        "parallel.dispatcher=alltoall needs parallel.expert above 1, got 1; drop it",
    ),
    (
        LLAMA,
        {"tensor": 6},
        "parallel.tensor must divide model.num_attention_heads=32, got 6; take parallel.tensor=4",
    ),
    (
        (*LLAMA, "model.num_attention_heads=24", "model.num_query_groups=12"),
        {"tensor": 8},
        "parallel.tensor must divide model.num_query_groups=12 or be a multiple of it, got 8; take parallel.tensor=4",
    ),
    (
        (*LLAMA, "model.num_query_groups=1", "model.head_dim=6", "model.ffn_hidden_size=8192"),
        {"tensor": 8},
        "parallel.tensor must divide the rows of qkv=204, got 8; take parallel.tensor=4",
    ),
    (
        (*LLAMA, "model.ffn_hidden_size=8190"),
        {"tensor": 4},
        "parallel.tensor must divide model.ffn_hidden_size=8190, got 4; take parallel.tensor=2",
    ),
    (
        (*EXPERTS, "model.mla.kv_lora_rank=510"),
        {"tensor": 4},
        "parallel.tensor must divide model.mla.kv_lora_rank + model.mla.qk_pos_emb_head_dim=574, got 4; take "
        "parallel.tensor=2",
    ),
    (
        (*EXPERTS, "model.mla.q_lora_rank=510"),
        {"tensor": 4},
        "parallel.tensor must divide model.mla.q_lora_rank=510, got 4; take parallel.tensor=2",
    ),
    (
        (*EXPERTS, "model.moe.expert_ffn_hidden_size=1405", "model.moe.num_shared_experts=2"),
        {"tensor": 4},
        "parallel.tensor must divide model.moe.num_shared_experts x model.moe.expert_ffn_hidden_size=2810, got 4; take "
        "parallel.tensor=1",
    ),
    (
        (*EXPERTS, "model.moe.expert_ffn_hidden_size=1406", "model.moe.num_shared_experts=0"),
        {"tensor": 4},
        "parallel.tensor must divide model.moe.expert_ffn_hidden_size=1406, got 4; take parallel.tensor=2",
    ),
    (
        (
            *LLAMA,
            "model.vocab_size=128",
            "model.num_attention_heads=3",
            "model.num_query_groups=3",
            "model.ffn_hidden_size=3",
        ),
        {"tensor": 3},
        "parallel.tensor must divide the padded rows of the vocabulary=128, got 3; take parallel.tensor=1",
    ),
    (
        (*EXPERTS,),
        {"pipeline": 8},
        "parallel.pipeline must leave a layer for every stage, and model.num_layers=27 in stages of 4 fill 7 of them, "
        "got 8; take parallel.pipeline=7",
    ),
    (
        LLAMA,
        {"pipeline": 2, "virtual_pipeline": 3},
        "parallel.pipeline x parallel.virtual_pipeline = 2 x 3 = 6 must divide model.num_layers=16; drop "
        "parallel.virtual_pipeline, or choose other sizes",
    ),
    (
        LLAMA,
        {"tensor": 2, "pipeline": 2, "processes": 6},
        "launcher.num_processes must be a multiple of parallel.tensor x parallel.context x parallel.pipeline = 2 x 1 x "
        "2 = 4, got 6; take launcher.num_processes=8, or smaller sizes",
    ),
    (
        LLAMA,
        {"context": 4, "processes": 2},
        "launcher.num_processes must be a multiple of parallel.tensor x parallel.context x parallel.pipeline = 1 x 4 x "
        "1 = 4, got 2; take launcher.num_processes=4, or smaller sizes",
    ),
    (
        EXPERTS,
        {"expert": 6, "processes": 12},
        "parallel.expert must divide model.moe.num_experts=64, got 6; take parallel.expert=4",
    ),
    (
        (*EXPERTS, "model.moe.expert_ffn_hidden_size=1406"),
        {"expert": 2, "expert_tensor": 4, "processes": 8},
        "parallel.expert_tensor must divide model.moe.expert_ffn_hidden_size=1406, got 4; take "
        "parallel.expert_tensor=2",
    ),
    (
        EXPERTS,
        {"expert": 8, "expert_tensor": 2, "processes": 8},
        "parallel.expert x parallel.expert_tensor = 8 x 2 = 16 must divide launcher.num_processes / parallel.pipeline "
        "= 8; take parallel.expert=4, or other sizes",
    ),
    (
        (*LLAMA, "training.seq_length=1001"),
        {"tensor": 2},
        "training.seq_length must be a multiple of 2, for parallel.tensor (sequence parallelism), got 1001; take "
        "training.seq_length=1000",
    ),
    (
        (*LLAMA, "training.seq_length=1002"),
        {"context": 2},
        "training.seq_length must be a multiple of 4, for 2 x parallel.context, got 1002; take "
        "training.seq_length=1000",
    ),
    (
        (*LLAMA, "training.seq_length=1004"),
        {"context": 2, "tensor": 4},
        "training.seq_length must be a multiple of 8, for 2 x parallel.context and parallel.tensor x parallel.context "
        "(sequence parallelism), got 1004; take training.seq_length=1000",
    ),
    (
        (*LLAMA, "training.attention=fused"),
        {"context": 2},
        "training.attention must be plain or tiled with parallel.context=2, whose ranks mask keys row by row, got "
        "fused; take training.attention=tiled",
    ),
    (
        LLAMA,
        {"tensor": 2, "processes": 12},
        "training.global_batch_size must be a multiple of training.micro_batch_size x data-parallel ranks "
        "(launcher.num_processes / 2) = 1 x 6 = 6, got 16; take training.global_batch_size=18",
    ),
    (
        (*LLAMA, "training.global_batch_size=6"),
        {"pipeline": 2, "virtual_pipeline": 2, "processes": 4},
        "training.global_batch_size must be a multiple of training.micro_batch_size x data-parallel ranks "
        "(launcher.num_processes / 2) x parallel.pipeline (interleaved) = 1 x 4 = 4, got 6; "
        "take training.global_batch_size=8",
    ),
    (
        (*LLAMA, "evaluation.every=1", "evaluation.samples=6"),
        {"pipeline": 4, "processes": 16},
        "evaluation.samples must be a multiple of 4 (training.micro_batch_size x data-parallel ranks "
        "(launcher.num_processes / 4)), got 6; take evaluation.samples=8",
    ),
]


@pytest.mark.parametrize(("model", "sizes", "words"), CASES, ids=[case[2][:70] for case in CASES])
def test_impossible_layout_is_refused_with_a_remedy(
    model: tuple[str, ...], sizes: dict[str, object], words: str
) -> None:
    assert refusal(*model, *parallel(**sizes)) == words


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (LLAMA, {"tensor": 8, "pipeline": 2}),
        (LLAMA, {"tensor": 32}),
        (LLAMA, {"tensor": 2, "sequence": "false", "context": 2}),
        (LLAMA, {"pipeline": 4, "virtual_pipeline": 4}),
        ((*LLAMA, "model.num_layers=27"), {"pipeline": 7}),
        (EXPERTS, {"tensor": 2, "expert": 8, "processes": 16, "dispatcher": "alltoall"}),
        (EXPERTS, {"tensor": 2, "expert": 2, "expert_tensor": 1, "processes": 4}),
        (EXPERTS, {"tensor": 2, "expert_tensor": 2}),
    ],
    ids=str,
)
def test_possible_layout_passes(model: tuple[str, ...], sizes: dict[str, object]) -> None:
    validated(*model, *parallel(**sizes))


@pytest.mark.parametrize("tensor", range(1, 17))
def test_megatron_refuses_the_same_heads(tensor: int) -> None:
    heads, groups = 12, 4
    words = (*LLAMA, f"model.num_attention_heads={heads}", f"model.num_query_groups={groups}")
    widths = (
        "model.ffn_hidden_size=24",
        "model.head_dim=12",
        "model.vocab_size=384",
        "training.seq_length=3840",
    )
    possible = True
    try:
        TransformerConfig(
            num_layers=1,
            hidden_size=heads * 12,
            num_attention_heads=heads,
            num_query_groups=groups,
            tensor_model_parallel_size=tensor,
            use_cpu_initialization=True,
        )
    except ValueError:
        possible = False
    if possible:
        validated(*words, *widths, *parallel(tensor=tensor))
    else:
        assert "parallel.tensor must divide model.num_" in refusal(
            *words, *widths, *parallel(tensor=tensor)
        )


def test_optimizer_may_be_divided_and_saved() -> None:
    saved = ("checkpoint.at_end=true", "checkpoint.optimizer=true")
    validated(*LLAMA, *saved, "training.distributed_optimizer=true", *parallel(processes=2))


def test_shipped_models_divide_by_eight() -> None:
    for model in ("llama31-8b", "llama32-1b", "deepseek2_lite"):
        words = (f"model={model}", *LLAMA[1:], *parallel(tensor=8))
        assert Layout.of(validated(*words, "parallel.unaligned=accept")).tensor == 8
