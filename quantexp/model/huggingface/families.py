"""The supported families of published models, and the entries of a config.json that have one value in each of them.

A family follows from the numbers of a model:

    deepseek_v2     latent attention
    qwen3_moe       experts, norms of query and key heads
    mixtral         experts without these norms
    qwen3           norms of query and key heads
    qwen2           biases of queries, keys and values
    mistral         a sliding window
    llama           none of these; a Mistral model without a window is the same
"""

from __future__ import annotations

from enum import Enum

from quantexp.schema import ModelConfig


class Family(Enum):
    """A family by its `model_type`."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MIXTRAL = "mixtral"
    QWEN3_MOE = "qwen3_moe"
    DEEPSEEK_V2 = "deepseek_v2"


#: The architecture of each family.
ARCHITECTURES = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.MISTRAL: "MistralForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
    Family.MIXTRAL: "MixtralForCausalLM",
    Family.QWEN3_MOE: "Qwen3MoeForCausalLM",
    Family.DEEPSEEK_V2: "DeepseekV2ForCausalLM",
}
Allowed = tuple[object, ...]
#: The code beside DeepSeek-V2's published configurations, which transformers has as its own by now.
_DEEPSEEK_CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV2Config",
    "AutoModel": "modeling_deepseek.DeepseekV2Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
}
_EVERYWHERE: dict[str, Allowed] = {
    "auto_map": (None,),
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
}
_NO_BIASES: dict[str, Allowed] = {"attention_bias": (False, None), "mlp_bias": (False, None)}
_NO_WINDOW: dict[str, Allowed] = {"use_sliding_window": (False, None)}
#: transformers adds a balancing loss of its own definition where it returns the router's logits.
_NO_BALANCING: dict[str, Allowed] = {"output_router_logits": (False, None)}
#: Required values; others would need code that does not exist.
FIXED: dict[Family, dict[str, Allowed]] = {
    Family.LLAMA: {**_EVERYWHERE, **_NO_BIASES},
    Family.MISTRAL: {**_EVERYWHERE, **_NO_BIASES},
    Family.QWEN2: {**_EVERYWHERE, **_NO_WINDOW},
    Family.QWEN3: {**_EVERYWHERE, **_NO_BIASES, **_NO_WINDOW},
    Family.MIXTRAL: {
        **_EVERYWHERE,
        **_NO_BIASES,
        **_NO_BALANCING,
        "router_jitter_noise": (0, None),
    },
    Family.QWEN3_MOE: {
        **_EVERYWHERE,
        **_NO_BIASES,
        **_NO_WINDOW,
        **_NO_BALANCING,
        "decoder_sparse_step": (1, None),
    },
    Family.DEEPSEEK_V2: {
        **_EVERYWHERE,
        **_NO_BIASES,
        "auto_map": (None, _DEEPSEEK_CODE),
        "topk_method": ("greedy", None),
        "scoring_func": ("softmax", None),
        "n_group": (1, None),
        "moe_layer_freq": (1, None),
    },
}


def family_of(model: ModelConfig) -> Family:
    """The family of a valid model."""
    if model.mla is not None:
        return Family.DEEPSEEK_V2
    if model.moe is not None:
        return Family.QWEN3_MOE if model.qk_norm else Family.MIXTRAL
    if model.qk_norm:
        return Family.QWEN3
    if model.qkv_bias:
        return Family.QWEN2
    return Family.LLAMA if model.sliding_window is None else Family.MISTRAL
