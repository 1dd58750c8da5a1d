"""Refuses Megatron's own settings of quantisation, and those with which it multiplies past the scheme's layers.

The scheme decides all of it, and proof and captures know no other. Without Transformer Engine Megatron quantises
nothing under these settings, and says nothing. A setting that a release of Megatron-Core lacks is neutral there.
"""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from quantexp.errors import ConfigError

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
