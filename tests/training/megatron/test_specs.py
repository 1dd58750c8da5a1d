from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from quantexp.training.megatron.attention import SchemeAttention
from quantexp.training.megatron.linear import SchemeColumnParallelLinear, SchemeRowParallelLinear
from quantexp.training.megatron.specs import inject, stock_layer_spec


def test_every_linear_layer_and_the_core_attention_are_replaced() -> None:
    layer = inject(stock_layer_spec()).submodules
    attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
    assert attention.linear_qkv is SchemeColumnParallelLinear
    assert attention.core_attention is SchemeAttention
    assert attention.linear_proj is SchemeRowParallelLinear
    assert mlp.linear_fc1 is SchemeColumnParallelLinear
    assert mlp.linear_fc2 is SchemeRowParallelLinear


def test_the_original_spec_is_unchanged() -> None:
    spec = stock_layer_spec()
    inject(spec)
    assert spec.submodules.self_attention.submodules.linear_qkv is ColumnParallelLinear


def test_nothing_else_is_changed() -> None:
    stock, ours = stock_layer_spec(), inject(stock_layer_spec())
    assert ours.module is stock.module
    assert ours.submodules.input_layernorm is stock.submodules.input_layernorm
    assert ours.submodules.self_attention.params == stock.submodules.self_attention.params


def test_classes_inside_dicts_and_lists_are_replaced() -> None:
    assert inject({"a": [ColumnParallelLinear], "b": (1, ColumnParallelLinear)}) == {
        "a": [SchemeColumnParallelLinear],
        "b": (1, SchemeColumnParallelLinear),
    }


def test_linear_layers_of_experts_are_replaced() -> None:
    spec = inject(get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm"))
    experts = spec.submodules.mlp.submodules.experts
    assert experts.submodules.linear_fc1 is SchemeColumnParallelLinear
    assert experts.submodules.linear_fc2 is SchemeRowParallelLinear
