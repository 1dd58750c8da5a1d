"""Builds a configured model with Megatron-Core and maps its modules to the names of the precision map."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from quantexp.model.decoder import ATTENTION, is_routed, shared_width, value_head_dim
from quantexp.model.sizes import padded_vocab_size
from quantexp.quant.precision import ModuleId, PrecisionMap
from quantexp.quant.weight_cache.weights import WeightCopies
from quantexp.schema import (
    AttentionPath,
    AuxLoss,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    Precision,
    Recompute,
    TrainingConfig,
)
from quantexp.training.megatron.attention import SchemeAttention
from quantexp.training.megatron.experts import moe_layers, pass_rows_to_experts
from quantexp.training.megatron.linear import SchemeLinear

SchemeModule = SchemeLinear | SchemeAttention

#: The path in a decoder layer of each module of the precision map, except routed experts.
PATHS = {
    "qkv": "self_attention.linear_qkv",
    "q-proj": "self_attention.linear_q_proj",
    "q-down": "self_attention.linear_q_down_proj",
    "q-up": "self_attention.linear_q_up_proj",
    "kv-down": "self_attention.linear_kv_down_proj",
    "kv-up": "self_attention.linear_kv_up_proj",
    ATTENTION: "self_attention.core_attention",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
    "shared-fc1": "mlp.shared_experts.linear_fc1",
    "shared-fc2": "mlp.shared_experts.linear_fc2",
}


def path_of(module: str) -> str:
    """The path in a decoder layer of a module of the precision map, for `get_submodule`."""
    if not is_routed(module):
        return PATHS[module]
    expert, _, name = module.partition("-")
    return f"mlp.experts.local_experts.{expert.removeprefix('expert')}.linear_{name}"


DTYPES = {
    Precision.bf16: torch.bfloat16,
    Precision.fp16: torch.float16,
    Precision.fp32: torch.float32,
}


def transformer_config(model: ModelConfig, training: TrainingConfig) -> TransformerConfig:
    """Megatron's configuration of the decoder.

    Fusions are off: their kernels are not available everywhere, and compared runs must use the same path. Weights are
    allocated on the CPU and not initialised.
    """
    dtype = DTYPES[training.precision]
    kind = TransformerConfig if model.mla is None else MLATransformerConfig
    return kind(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=value_head_dim(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        init_method_std=model.init_std,
        bf16=training.precision is Precision.bf16,
        fp16=training.precision is Precision.fp16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,  # see load_initial_weights
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **_latent(model, model.mla),
        **_experts(model, model.moe),
        **_recompute(training.recompute),
    )


def _latent(model: ModelConfig, mla: MlaConfig | None) -> dict[str, object]:
    """Megatron's latent attention settings, which include the rotary embedding."""
    if mla is None:
        return {}
    settings: dict[str, object] = {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "qk_layernorm": True,
        "rotary_base": model.rotary_base,
    }
    if mla.yarn is None:  # a factor of 1 leaves the softmax scale as it is
        return {**settings, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    return {
        **settings,
        "rope_type": "yarn",
        "rotary_scaling_factor": mla.yarn.factor,
        "original_max_position_embeddings": mla.yarn.original_length,
        "beta_fast": mla.yarn.beta_fast,
        "beta_slow": mla.yarn.beta_slow,
        "mscale": mla.yarn.mscale,
        "mscale_all_dim": mla.yarn.mscale_all_dim,
    }


#: Megatron's names; without a balancing loss the coefficient is 0.
_BALANCING = {
    AuxLoss.none: "none",
    AuxLoss.batch: "aux_loss",
    AuxLoss.sequence: "seq_aux_loss",
}


def _experts(model: ModelConfig, moe: MoeConfig | None) -> dict[str, object]:
    """Megatron's settings of the experts: no token is dropped and the router computes in fp32, as published."""
    if moe is None:
        return {}
    num_moe_layers = model.num_layers - moe.num_dense_layers
    normalised = moe.norm_topk_prob and moe.top_k > 1
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [0] * moe.num_dense_layers + [1] * num_moe_layers,
        "moe_ffn_hidden_size": moe.expert_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shared_width(moe) or None,
        "moe_router_topk": moe.top_k,
        "moe_router_pre_softmax": not normalised,
        "moe_router_topk_scaling_factor": moe.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": _BALANCING[moe.aux_loss],
        "moe_aux_loss_coeff": moe.aux_loss_coefficient,
        "moe_token_dispatcher_type": "allgather",
    }


def _recompute(recompute: Recompute) -> dict[str, object]:
    if recompute is Recompute.none:
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def build_model(
    model: ModelConfig,
    training: TrainingConfig,
    layer_spec: ModuleSpec | TransformerBlockSubmodules,
) -> tuple[GPTModel, TransformerConfig]:
    """Megatron's GPTModel for a configuration and a layer spec, in the working dtype, on the CPU.

    Its weights are uninitialised: `load_initial_weights` sets them.
    """
    config = transformer_config(model, training)
    gpt = GPTModel(
        config,
        layer_spec,
        vocab_size=padded_vocab_size(model.vocab_size),
        max_sequence_length=training.seq_length,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_scaling_factor is not None,
        rope_scaling_factor=model.rope_scaling_factor or 1.0,
    )
    for moe in moe_layers(gpt).values():
        pass_rows_to_experts(moe)
    return gpt, config


def scheme_modules(model: GPTModel) -> dict[ModuleId, SchemeModule]:
    """The decoder's modules that use the scheme's products, by their names in the precision map."""
    modules: dict[ModuleId, SchemeModule] = {}
    for layer in model.decoder.layers:
        for name, module in _by_name(layer):
            if isinstance(module, SchemeLinear | SchemeAttention):
                modules[ModuleId(layer.layer_number - 1, name)] = module
    return modules


def _by_name(layer: Any) -> Iterator[tuple[str, Any]]:
    """The modules of a layer that the precision map may name."""
    names = {path: name for name, path in PATHS.items()}
    experts = getattr(getattr(layer.mlp, "experts", None), "local_experts", ())
    for index in range(len(experts)):
        for part in ("fc1", "fc2"):
            name = f"expert{index}-{part}"
            names[path_of(name)] = name
    for path, module in layer.named_modules():
        if path in names:
            yield names[path], module


def set_precision(
    model: GPTModel, precision: PrecisionMap, path: AttentionPath = AttentionPath.plain
) -> None:
    """Set every module's precision and attention path; call again whenever the map changes.

    Raises:
        RuntimeError: the model and the map have different modules.
    """
    modules = scheme_modules(model)
    if modules.keys() != precision.keys():
        raise RuntimeError(
            f"the model has {len(modules)} scheme modules, but the precision map has {len(precision)}"
        )
    for name, module in modules.items():
        module.precision = precision[name]
        if isinstance(module, SchemeAttention):
            module.path = path


def share_weight_copies(model: GPTModel, copies: WeightCopies) -> None:
    """Share `copies` between the decoder's linear layers; loading a state dict clears it."""
    for module in scheme_modules(model).values():
        if isinstance(module, SchemeLinear):
            module.copies = copies
    model.register_load_state_dict_post_hook(lambda *_: copies.drop())
