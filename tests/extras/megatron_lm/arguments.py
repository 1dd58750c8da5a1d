"""Megatron-LM's arguments as it parses them for a small Llama: those that the adapter reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 192,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 32,
    "padded_vocab_size": 5120,
    "max_position_embeddings": 64,
    "layernorm_epsilon": 1e-5,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "untie_embeddings_and_output_weights": True,
    "init_method_std": 0.02,
    "add_qkv_bias": False,
    "add_bias_linear": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "num_experts": None,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None,
    "moe_ffn_hidden_size": None,
    "moe_router_topk": 2,
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_token_dispatcher_type": "allgather",
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 3,
    "train_samples": None,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "seed": 1234,
    "fp16": False,
    "bf16": True,
    "recompute_granularity": None,
    "use_distributed_optimizer": False,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "world_size": 1,
    "data_path": None,
    "mock_data": True,
    "gradient_accumulation_fusion": False,
}


def llama(**changed: Any) -> Any:
    """The arguments, with some changed or added."""
    return SimpleNamespace(**{**_LLAMA, **changed})
