"""Arguments that would bypass the scheme are refused by the name that the user typed."""

from __future__ import annotations

from typing import Any

import pytest

from quantexp.errors import ConfigError
from quantexp.extras.megatron_lm.refused import refusals, require_possible
from tests.extras.megatron_lm.arguments import llama

#: What Megatron-LM parses -> words of the message.
_CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"gradient_accumulation_fusion": True},
        r"gradient accumulation fusion \(on by default\) multiplies the weight gradient itself.*; add "
        "--no-gradient-accumulation-fusion",
    ),
    ({"fp8": "hybrid"}, "--fp8-format quantises nothing in Megatron's own linear layers; drop it"),
    ({"fp4": "e2m1"}, "--fp4-format quantises nothing in Megatron's own linear layers; drop it"),
    ({"fp8_param_gather": True}, "--fp8-param-gather needs Transformer Engine's linear layers"),
    (
        {"attention_backend": "flash"},
        "--attention-backend chooses a kernel of Transformer Engine, and attention is the scheme's",
    ),
    ({"use_flash_attn": True}, "--use-flash-attn chooses a kernel"),
    ({"flash_attention_version": 3}, "--flash-attention-version chooses a kernel"),
    ({"fp8_output_proj": True}, "--fp8-output-proj quantises nothing"),
    ({"use_grouped_gemm_for_dense_mlp": True}, "--use-grouped-gemm-for-dense-mlp needs"),
    ({"use_grouped_gemm_for_shared_expert": True}, "--use-grouped-gemm-for-shared-expert needs"),
    ({"use_transformer_engine_op_fuser": True}, "--use-transformer-engine-op-fuser needs"),
    ({"mla_down_proj_fusion": True}, "--mla-down-proj-fusion needs Transformer Engine's"),
    ({"fused_residual_rmsnorm": True}, "--fused-residual-rmsnorm needs Transformer Engine's"),
    ({"moe_paged_stash": True}, "--moe-paged-stash needs Transformer Engine's"),
    (
        {"overlap_dispatch_backward_with_experts_wgrad": True},
        "--overlap-dispatch-backward-with-experts-wgrad needs",
    ),
    ({"dataloader_inter_document_masking": True}, "--dataloader-inter-document-masking packs"),
    ({"freeze_all_layers": True}, "--freeze-all-layers trains nothing that could be proved"),
    ({"logits_load_dir": "teacher"}, "--logits-load-dir trains on another loss"),
    ({"use_mup": True}, "--use-mup is in no family"),
    ({"moe_mlp_glu_interleave_size": 32}, "--moe-mlp-glu-interleave-size is in no family"),
    (
        {"moe_shared_expert_glu_interleave_size": 32},
        "--moe-shared-expert-glu-interleave-size is in no family",
    ),
    (
        {"gtp_weight_remat_size": 2},
        "--tensor-parallel-num-weight-shards, --expert-tensor-parallel-num-weight-shards gather "
        "weights for each product.*; leave them at the number of tensor-parallel ranks",
    ),
    (
        {"gtp_weight_remat_size": 1, "expert_gtp_weight_remat_size": 2},
        "--tensor-parallel-num-weight-shards, --expert-tensor-parallel-num-weight-shards gather",
    ),
    (
        {"mlp_chunks_for_training": 2},
        "--mlp-chunks-for-training multiplies a feed-forward in pieces",
    ),
    ({"moe_expert_rank_capacity_factor": 1.0}, "--moe-expert-rank-capacity-factor drops tokens"),
    ({"step_batch_size_schedule": "0:4"}, "--step-batch-size-schedule changes the number of micro"),
    ({"moe_grouped_gemm": True}, "--moe-grouped-gemm multiplies all experts at once"),
    ({"use_kitchen": True}, "--use-kitchen quantises by itself"),
    ({"tp_comm_overlap": True}, "--tp-comm-overlap needs Transformer Engine's linear layers"),
    ({"delay_wgrad_compute": True}, "--delay-wgrad-compute needs Transformer Engine's"),
    ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm needs"),
    ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading needs"),
    ({"use_te_activation_func": True}, "--use-te-activation-func needs Transformer Engine's"),
    (
        {"cuda_graph_impl": "local"},
        "--cuda-graph-impl replays products that no proof and no capture sees",
    ),
    ({"sft": True}, "--sft packs sequences, which the scheme's attention does not take"),
    ({"mtp_num_layers": 1}, "--mtp-num-layers builds layers that --spec does not describe"),
    ({"yaml_cfg": "run.yaml"}, "--yaml-cfg replaces the arguments"),
    ({"qk_clip": True}, "--qk-clip reads scores from Transformer Engine's attention"),
    ({"log_max_attention_logit": True}, "--log-max-attention-logit reads scores from"),
    ({"skip_train": True}, "--skip-train trains nothing that could be proved"),
    ({"swiglu": False}, "--swiglu is missing: a feed-forward without a gate .*; add --swiglu"),
    ({"normalization": "LayerNorm"}, "--normalization other than RMSNorm is in no family .*; add"),
    (
        {"add_bias_linear": True},
        "--disable-bias-linear is missing: a linear layer with a bias, but for qkv",
    ),
    ({"position_embedding_type": "learned_absolute"}, "--position-embedding-type other than rope"),
    ({"rotary_percent": 0.5}, "--rotary-percent other than 1.0 is in no family"),
    ({"window_size": (128, 0)}, "--window-size is in no family"),
    ({"qk_l2_norm": True}, "--qk-l2-norm is in no family"),
    ({"heterogeneous_layers_config_path": "h.json"}, "--heterogeneous-layers-config-path is in no"),
    ({"experimental_attention_variant": "gated"}, "--experimental-attention-variant is in no"),
    (
        {"multi_latent_attention": True},
        "--qk-layernorm is missing: latent attention without norms of its latents",
    ),
    ({"num_experts": 4, "moe_layer_freq": 2}, "--moe-layer-freq must be dense layers first"),
    ({"num_experts": 4, "moe_layer_freq": [1, 0]}, "--moe-layer-freq must be dense layers first"),
    (
        {"num_experts": 4, "moe_shared_expert_intermediate_size": 100},
        "--moe-shared-expert-intermediate-size must be a multiple of --moe-ffn-hidden-size",
    ),
    ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 divides parameters"),
    ({"use_megatron_fsdp": True}, "--use-megatron-fsdp divides parameters"),
    ({"init_model_with_meta_device": True}, "--init-model-with-meta-device divides parameters"),
    (
        {"pipeline_model_parallel_layout": "Et|tL"},
        "--pipeline-model-parallel-layout divides layers",
    ),
    ({"decoder_first_pipeline_num_layers": 1}, "--decoder-first-pipeline-num-layers divides"),
    ({"decoder_last_pipeline_num_layers": 1}, "--decoder-last-pipeline-num-layers divides"),
    (
        {"account_for_embedding_in_pipeline_split": True},
        "--account-for-embedding-in-pipeline-split",
    ),
    ({"account_for_loss_in_pipeline_split": True}, "--account-for-loss-in-pipeline-split divides"),
    (
        {"context_parallel_size": 2, "create_attention_mask_in_dataloader": True},
        "--context-parallel-size needs attention without a mask from the data loader.*; add "
        "--no-create-attention-mask-in-dataloader",
    ),
    ({"use_tp_pp_dp_mapping": True}, "--use-tp-pp-dp-mapping divides layers or ranks"),
    ({"hierarchical_context_parallel_sizes": [2, 2]}, "--hierarchical-context-parallel-sizes div"),
    ({"hybrid_context_parallel": True}, "--hybrid-context-parallel divides layers or ranks"),
    ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor drops tokens"),
    ({"rampup_batch_size": ["2", "2", "8"]}, "--rampup-batch-size changes the number of micro-"),
    ({"perform_rl_step": True}, "--perform-rl-step trains by another loop"),
]


@pytest.mark.parametrize(("changed", "words"), _CASES, ids=lambda case: str(case)[:40])
def test_an_argument_that_bypasses_the_scheme_is_refused(
    changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        require_possible(llama(**changed), "0.16.1")


def test_every_refusal_has_a_case() -> None:
    said = " ".join(words for _, words in _CASES)
    assert [each.argument for each in refusals() if each.argument not in said] == []


def test_a_plain_llama_passes() -> None:
    require_possible(llama(), "0.16.1")
    require_possible(llama(num_experts=4, moe_layer_freq=[0, 1]), "0.15.3")


@pytest.mark.parametrize("version", ["0.14.0", "0.20.0", "0.1.6"])
def test_a_version_that_was_not_run_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"with Megatron-LM 0.15 to 0.19, got {version}; check"):
        require_possible(llama(), version)
