"""Small models of transformers, with random weights, stored like published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.model.huggingface.configuration import numbers, read_config
from quantexp.schema import (
    AuxLoss,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    Precision,
    TrainingConfig,
    YarnConfig,
)

#: Extents that are neither powers of two nor multiples of one another, and vocabularies that Megatron pads.
LLAMA31: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 201,
    "hidden_size": 60,
    "intermediate_size": 84,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
LLAMA32 = {
    **LLAMA31,
    "vocab_size": 128,
    "num_hidden_layers": 3,
    "hidden_size": 55,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 18,
    "rope_scaling": {**LLAMA31["rope_scaling"], "factor": 32.0},
    "tie_word_embeddings": True,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 76,
    "moe_intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 10,
    "v_head_dim": 14,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "tie_word_embeddings": False,
}
_GROUPED: dict[str, Any] = {
    "vocab_size": 201,
    "hidden_size": 60,
    "intermediate_size": 84,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
MISTRAL = {**_GROUPED, "model_type": "mistral", "head_dim": 14, "sliding_window": 41}
QWEN2 = {
    **_GROUPED,
    "model_type": "qwen2",
    "use_sliding_window": False,
    "sliding_window": 16,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
}
QWEN3 = {
    **_GROUPED,
    "model_type": "qwen3",
    "head_dim": 14,
    "attention_bias": False,
    "use_sliding_window": False,
}
MIXTRAL = {
    **_GROUPED,
    "model_type": "mixtral",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
}
QWEN3_MOE = {
    **_GROUPED,
    "model_type": "qwen3_moe",
    "head_dim": 14,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
FAMILIES = {
    "llama31": LLAMA31,
    "llama32": LLAMA32,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v2": DEEPSEEK,
}


def published_model(config: dict[str, Any], seed: int = 5) -> Any:
    """The model of transformers, in fp32, with weights large enough for every product to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    content = dict(config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(content.pop("model_type"), **content), attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".bias"):
                parameter.copy_(noise)
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model.eval()


def write(model: Any, config: dict[str, Any], folder: Path, **how: Any) -> Path:
    """The folder that transformers publishes, with additional entries in its config.json."""
    model.save_pretrained(folder, **how)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **config}))
    return folder


def as_model(config: dict[str, Any], **changes: Any) -> ModelConfig:
    """The model of a config.json's content."""
    content = numbers(config, Path("config.json"))
    mla, moe = content.pop("mla"), content.pop("moe")
    if mla is not None:
        yarn = mla.pop("yarn")
        mla = MlaConfig(**mla, yarn=yarn and YarnConfig(**yarn))
    if moe is not None:
        moe = MoeConfig(**{**moe, "aux_loss": AuxLoss[moe["aux_loss"]]})
    return ModelConfig(**{"name": "small", "mla": mla, "moe": moe, **content, **changes})


def of_folder(folder: Path, **changes: Any) -> ModelConfig:
    """The model of a published folder, initialised with its weights."""
    return as_model(read_config(folder), init_from=str(folder), **changes)


def training(precision: Precision = Precision.fp32) -> TrainingConfig:
    return TrainingConfig(seq_length=41, precision=precision)


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of transformers' model by published names; in memory it stores all experts in one tensor."""
    by_name: dict[str, Tensor] = {}
    is_mixtral = model.config.model_type == "mixtral"
    for name, parameter in model.named_parameters():
        if is_mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            by_name[name] = parameter.grad
            continue
        prefix, _, which = name.rpartition(".")
        for expert, gradient in enumerate(parameter.grad):
            parts = (
                zip(("gate_proj", "up_proj"), gradient.chunk(2), strict=True)
                if which == "gate_up_proj"
                else [("down_proj", gradient)]
            )
            mixtrals = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
            by_name |= {
                f"{prefix}.{expert}.{mixtrals[part] if is_mixtral else part}.weight": value
                for part, value in parts
            }
    return by_name
