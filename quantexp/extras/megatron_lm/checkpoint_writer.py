"""Writes published weights as a Megatron-LM checkpoint in the format torch_dist, without Megatron.

Megatron-LM starts from it with `--load FOLDER --finetune`, in any layout: the checkpoint has weights and no optimizer.
The names are those of the reader; every linear layer has the empty extra state with which Megatron-LM's own have it.
For `--use-checkpoint-args` it holds the model as Megatron-LM's arguments, the inverse of `described`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.extras.megatron_lm.checkpoint_reader import (
    COMMON,
    EXPERT,
    FUSED,
    LATEST,
    no_word_of_one_process,
    split_name,
)
from quantexp.model.decoder import moe_of, shared_width
from quantexp.model.huggingface.blocks import blocks_of
from quantexp.model.huggingface.mapping import mapping
from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.huggingface.weights import Weights, read_rows
from quantexp.model.shards import WHOLE
from quantexp.model.sizes import padded_vocab_size
from quantexp.schema import MlaConfig, ModelConfig, MoeConfig

if TYPE_CHECKING:
    from torch import Tensor


_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write_checkpoint(
    model: ModelConfig, weights: Weights, padding: Weights | None, folder: Path, iteration: int
) -> None:
    """Write a checkpoint into a new folder; the whole model is in memory.

    Args:
        model: its configuration.
        weights: its published tensors.
        padding: the padding rows of the vocabulary; None makes them zero.
        folder: receives `iter_<iteration>/` and the file that names it.
        iteration: the iteration of the weights.

    Raises:
        OSError: it cannot be written.
        DataError: the weights cannot be read.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    inner = folder / f"iter_{iteration:07d}"
    inner.mkdir(parents=True)
    content = _content(model, weights, padding)
    with no_word_of_one_process():
        save(content, storage_writer=FileSystemWriter(inner), no_dist=True)
    common = {"args": arguments_of(model), "checkpoint_version": 3.0, "iteration": iteration}
    torch.save(common, inner / COMMON)
    (inner / "metadata.json").write_text(json.dumps(_METADATA))
    (folder / LATEST).write_text(str(iteration))


def _content(model: ModelConfig, weights: Weights, padding: Weights | None) -> dict[str, Any]:
    """Everything by its key; the tensors of equal layers, and of a layer's experts, are stacked."""
    import torch

    is_uniform = len({moe_of(model, layer) is None for layer in range(model.num_layers)}) == 1
    stacks: dict[str, list[Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    #: For each linear layer an entry for its one replica.
    states: dict[str, list[None]] = {}
    for parameter in mapping(model):
        tensor = _read(parameter, weights, padding)
        key, leading = _place(model, parameter.name, is_uniform)
        stacks.setdefault(key, []).append(tensor)
        shapes[key] = (*leading, *tensor.shape)
        states |= {name: [None] for name in _extra_states(model, parameter.name, is_uniform)}
    stacked = {
        key: torch.stack(tensors).view(shapes[key]).contiguous()
        if len(tensors) > 1
        else tensors[0].view(shapes[key])
        for key, tensors in stacks.items()
    }
    return {**stacked, **states}


def _place(model: ModelConfig, name: str, is_uniform: bool) -> tuple[str, tuple[int, ...]]:
    """The key of a parameter, and the leading axes of its stack: layers, experts."""
    layer, own = split_name(name)
    if layer is None:
        return name, ()
    moe = moe_of(model, layer)
    rest = own if model.mla is not None else FUSED.get(own, own)
    experts: tuple[int, ...] = ()
    if (found := EXPERT.fullmatch(rest)) is not None and moe is not None:
        rest, experts = f"{found[1]}.experts.{found[3]}", (moe.num_experts,)
    if is_uniform:
        return f"decoder.layers.{rest}", (model.num_layers, *experts)
    return f"decoder.layers.{layer}.{rest}", experts


def _extra_states(model: ModelConfig, name: str, is_uniform: bool) -> Iterator[str]:
    """The keys of the extra state of a linear layer, whose weight has the name."""
    layer, own = split_name(name)
    if layer is None or ".linear_" not in own or not own.endswith(".weight"):
        return
    key, shape = _place(model, name, is_uniform)
    expert = EXPERT.fullmatch(own)
    index = [*((layer,) if is_uniform else ()), *(() if expert is None else (int(expert[2]),))]
    place, size = (".".join(map(str, each)) for each in (index or [0], shape or (1,)))
    yield f"{key.removesuffix('weight')}_extra_state/shard_{place}_{size}"


def _read(parameter: Parameter, weights: Weights, padding: Weights | None) -> Tensor:
    import torch

    rows: list[Tensor] = []
    for block in blocks_of(parameter, WHOLE):
        origin = padding if block.tensor == parameter.name else weights
        if origin is None:
            rows.append(torch.zeros_like(rows[-1][:1]).expand(block.count, *rows[-1].shape[1:]))
        else:
            rows.append(
                read_rows(origin.tensors[block.tensor], block.first, block.count, block.columns)
            )
    return torch.cat(rows).view(parameter.shape)


def arguments_of(model: ModelConfig) -> argparse.Namespace:
    """The arguments that build a model in Megatron-LM."""
    scaling = model.rope_scaling_factor
    return argparse.Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        group_query_attention=model.mla is None,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        padded_vocab_size=padded_vocab_size(model.vocab_size),
        max_position_embeddings=model.max_sequence_length,
        seq_length=model.max_sequence_length,
        norm_epsilon=model.norm_epsilon,
        layernorm_epsilon=model.norm_epsilon,
        rotary_base=model.rotary_base,
        rotary_percent=1.0,
        use_rope_scaling=scaling is not None,
        rope_scaling_factor=8.0 if scaling is None else scaling,
        position_embedding_type="rope",
        add_position_embedding=False,
        untie_embeddings_and_output_weights=not model.tie_embeddings,
        init_method_std=model.init_std,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm or model.mla is not None,
        multi_latent_attention=model.mla is not None,
        **_latent(model.mla),
        **_experts(model.moe, model.num_layers),
    )


def _latent(mla: MlaConfig | None) -> dict[str, Any]:
    if mla is None:
        return {}
    yarn = mla.yarn
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope" if yarn is None else "yarn",
        "rotary_scaling_factor": 1.0 if yarn is None else yarn.factor,
        "original_max_position_embeddings": 4096 if yarn is None else yarn.original_length,
        "beta_fast": 32.0 if yarn is None else yarn.beta_fast,
        "beta_slow": 1.0 if yarn is None else yarn.beta_slow,
        "mscale": 1.0 if yarn is None else yarn.mscale,
        "mscale_all_dim": 0.0 if yarn is None else yarn.mscale_all_dim,
    }


def _experts(moe: MoeConfig | None, num_layers: int) -> dict[str, Any]:
    if moe is None:
        return {"num_experts": None}
    dense = moe.num_dense_layers
    return {
        "num_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.expert_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shared_width(moe) or None,
        "moe_layer_freq": [0] * dense + [1] * (num_layers - dense) if dense else 1,
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": moe.routed_scaling_factor,
    }
