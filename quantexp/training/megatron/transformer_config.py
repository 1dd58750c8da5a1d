"""Megatron's configuration of a decoder, its optimizer and schedule, without Megatron's own settings of quantisation.

Those, and the settings with which it multiplies past the scheme's layers, are refused: the scheme decides all of it,
and proof and captures know no other. Without Transformer Engine Megatron quantises nothing under these settings, and
says nothing. A setting that a release of Megatron-Core lacks is neutral there.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from quantexp.errors import ConfigError
from quantexp.model.decoder import shared_width, value_head_dim
from quantexp.model.layout import Layout
from quantexp.runs.metrics import MIN_LOSS_SCALE
from quantexp.schema import (
    AuxLoss,
    Dispatcher,
    LrSchedule,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    Precision,
    Recompute,
    TrainingConfig,
)

#: The layout of a model that one process holds whole.
ONE_PROCESS = Layout()
DTYPES = {
    Precision.bf16: torch.bfloat16,
    Precision.fp16: torch.float16,
    Precision.fp32: torch.float32,
}

_BESIDE = "quantises beside the scheme, or without Transformer Engine nothing at all"
_NO_WEIGHTS = "leaves no weights in high precision to quantise"
_PAST = "multiplies past the scheme's layers"
_SHARDED = "gathers weights for each product, which the scheme's layers do not"
_SCALED = "scales weights, logits and rates in a way that no run records"
_UNSEEN = "replays products that no proof and no capture sees"
_DROPPED = "drops tokens of experts, which no run records"
#: Setting -> the value without an effect, and what another one would do.
_SETTINGS: dict[str, tuple[object, str]] = {
    "fp8": (None, _BESIDE),
    "fp4": (None, _BESIDE),
    "fp8_param": (False, _NO_WEIGHTS),
    "fp4_param": (False, _NO_WEIGHTS),
    "fp8_wgrad": (True, "has no effect in Transformer Engine 2"),
    "fp8_output_proj": (False, _BESIDE),
    "quant_recipe": (None, "gives modules recipes beside the scheme"),
    "use_kitchen": (False, "takes linear layers that the scheme does not reach"),
    "gradient_accumulation_fusion": (
        False,
        "computes the weight gradient past the scheme, and under te_emulated loses it",
    ),
    "mla_down_proj_fusion": (False, _PAST),
    "use_transformer_engine_op_fuser": (False, _PAST),
    "moe_grouped_gemm": (False, _PAST),
    "use_grouped_gemm_for_dense_mlp": (False, _PAST),
    "use_grouped_gemm_for_shared_expert": (False, _PAST),
    "overlap_dispatch_backward_with_experts_wgrad": (False, _PAST),
    "delay_wgrad_compute": (False, _PAST),
    "flash_attention_version": (None, "chooses a kernel, and attention is the scheme's"),
    "fused_residual_rmsnorm": (False, "rounds the residual stream inside a norm"),
    "mtp_num_layers": (None, "builds layers that the scheme's spec does not describe"),
    "gtp_weight_remat_size": (1, _SHARDED),
    "expert_gtp_weight_remat_size": (1, _SHARDED),
    "tensor_parallel_num_weight_shards": (None, _SHARDED),
    "expert_tensor_parallel_num_weight_shards": (None, _SHARDED),
    "use_mup": (False, _SCALED),
    "moe_expert_rank_capacity_factor": (None, _DROPPED),
    "moe_expert_capacity_factor": (None, _DROPPED),
    "moe_paged_stash": (
        False,
        "keeps the inputs of experts in memory that no product of the scheme reads",
    ),
    "cuda_graph_impl": ("none", _UNSEEN),
}


def transformer_config(
    model: ModelConfig,
    training: TrainingConfig,
    layout: Layout = ONE_PROCESS,
    dispatcher: Dispatcher = Dispatcher.allgather,
) -> TransformerConfig:
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
        disable_parameter_transpose_cache=True,  # Transformer Engine would keep old weights
        **_parallel(layout, model.num_layers),
        **_grouped_query(model),
        **_latent(model, model.mla),
        **_experts(model, model.moe, dispatcher),
        **_recompute(training.recompute),
    )


def _parallel(layout: Layout, num_layers: int) -> dict[str, object]:
    """Megatron's settings of the layout; a last stage with fewer layers is named."""
    last = len(layout.layers(num_layers, layout.pipeline - 1))
    is_even = layout.chunks > 1 or last * layout.pipeline == num_layers
    return {
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
        # In a batch, messages of two chunks between the same two ranks are taken for one another.
        "overlap_p2p_comm": layout.chunks > 1,
        "batch_p2p_comm": layout.chunks == 1,
        "num_layers_in_last_pipeline_stage": None if is_even else last,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def _grouped_query(model: ModelConfig) -> dict[str, object]:
    """Megatron's settings of attention whose heads share no latent."""
    if model.mla is not None:
        return {}
    return {"add_qkv_bias": model.qkv_bias, "qk_layernorm": model.qk_norm}


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


def _experts(
    model: ModelConfig, moe: MoeConfig | None, dispatcher: Dispatcher
) -> dict[str, object]:
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
        "moe_token_dispatcher_type": dispatcher.value,
    }


def _recompute(recompute: Recompute) -> dict[str, object]:
    if recompute is Recompute.none:
        return {}
    if recompute is Recompute.selective:
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def refuse_own_quantisation(config: TransformerConfig) -> None:
    """Refuse a configuration with which Megatron quantises by itself, or multiplies past the scheme.

    Raises:
        ConfigError: names the setting, and what it would do.
    """
    for name, (neutral, effect) in _SETTINGS.items():
        value = getattr(config, name, neutral)
        if value != neutral:
            raise ConfigError(
                f"TransformerConfig.{name} {effect}, got {value!r}; leave it at {neutral}: quant, "
                "quant.backend and model decide"
            )


#: Megatron's names of schedules that differ from ours.
_DECAY_STYLES = {LrSchedule.wsd: "WSD"}


def optimizer_config(training: TrainingConfig, distributed: bool = False) -> OptimizerConfig:
    """Adam; `distributed`: each data-parallel rank keeps a share of the optimizer's state."""
    return OptimizerConfig(
        optimizer="adam",
        lr=training.lr,
        min_lr=training.min_lr,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        clip_grad=training.clip_grad,
        bf16=training.precision is Precision.bf16,
        fp16=training.precision is Precision.fp16,
        params_dtype=DTYPES[training.precision],
        initial_loss_scale=training.initial_loss_scale,
        min_loss_scale=MIN_LOSS_SCALE,
        use_distributed_optimizer=distributed,
    )


def scheduler(training: TrainingConfig, optimizer: Any) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay, which steps once an iteration."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=training.lr,
        min_lr=training.min_lr,
        lr_warmup_steps=training.warmup_iterations,
        lr_decay_steps=training.iterations,
        lr_decay_style=_DECAY_STYLES.get(training.lr_schedule, training.lr_schedule.value),
        wsd_decay_steps=training.decay_iterations,
        lr_wsd_decay_style="linear",
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=training.iterations,
        wd_incr_style="constant",
    )


def rate(optimizer: Any, *, is_held: bool) -> float:
    """The learning rate of the next step, which is 0 while the weights are held (`training.held_iterations`)."""
    if is_held:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    return float(optimizer.param_groups[0]["lr"])
