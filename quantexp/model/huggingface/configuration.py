"""Converts between a published config.json and `ModelConfig`.

Every entry that affects a model's numbers is either a number of `ModelConfig` or must have the fixed value of the model
family. Any other value in a config.json is refused, so that a model is never merely similar to the published one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantexp.errors import ConfigError, UnreadableError
from quantexp.model.huggingface.entries import (
    Entries,
    Json,
    mixtral_experts,
    mixtral_json,
    qwen3_experts,
    qwen3_json,
)
from quantexp.model.huggingface.families import ARCHITECTURES, FIXED, Family, family_of
from quantexp.reading.json_files import require_json
from quantexp.schema import AuxLoss, ModelConfig

#: Fixed parameters of Megatron's Llama 3 scaling of rotary frequencies; only the factor is free.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_config(file: Path) -> dict[str, Any]:
    """The content of a config.json (or of the one in a folder).

    Raises:
        ConfigError: missing, or not a JSON object.
    """
    file = file / "config.json" if file.is_dir() else file
    try:
        return require_json(file, dict[str, Any])
    except UnreadableError as error:
        raise ConfigError(f"{error}; give a model's config.json") from error


def numbers(content: Json, file: Path) -> dict[str, Any]:
    """The keys of `ModelConfig`, except its name, that a published configuration determines.

    Raises:
        ConfigError: an unsupported architecture, or a missing or unsupported number.
    """
    family = _family(content, file)
    for key, allowed in FIXED[family].items():
        if key in content and not any(_is_same(content[key], value) for value in allowed):
            raise ConfigError(
                f"{file}: {key} must be {allowed[0]!r} to be built here, got {content[key]!r}"
            )
    read = Entries(content, file)
    common = {
        "num_layers": read.number("num_hidden_layers"),
        "hidden_size": read.number("hidden_size"),
        "ffn_hidden_size": read.number("intermediate_size"),
        "num_attention_heads": read.number("num_attention_heads"),
        "vocab_size": read.number("vocab_size"),
        "max_sequence_length": read.number("max_position_embeddings"),
        "norm_epsilon": read.number("rms_norm_eps"),
        "tie_embeddings": read.flag("tie_word_embeddings", False),
        "init_std": read.number("initializer_range", default=0.02),
        "rotary_base": read.rope_theta(),
    }
    if family is Family.DEEPSEEK_V2:
        return {**common, **_deepseek(read)}
    return {**common, **_grouped_query(read, family)}


def _family(content: Json, file: Path) -> Family:
    kind, architectures = content.get("model_type"), content.get("architectures")
    family = next((each for each in Family if each.value == kind), None)
    if family is None:
        names = architectures if isinstance(architectures, list) else []
        architecture = ", ".join(map(str, names or ["none named"]))
        known = ", ".join(f"{each.value} ({name})" for each, name in ARCHITECTURES.items())
        raise ConfigError(
            f"{file} is of model_type {kind!r} ({architecture}), which is not built here; built are {known}"
        )
    if architectures is not None and architectures != [ARCHITECTURES[family]]:
        raise ConfigError(
            f"{file}: architectures must be [{ARCHITECTURES[family]!r}] to be built here, got {architectures!r}"
        )
    return family


def _is_same(value: object, allowed: object) -> bool:
    """Whether values are equal and of one type, in which 0 and 0.0 are alike and False is not a number."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _grouped_query(read: Entries, family: Family) -> dict[str, Any]:
    heads = read.number("num_attention_heads")
    groups = {"default": heads} if family is Family.LLAMA else {}
    moe = None
    if family is Family.MIXTRAL:
        moe = mixtral_experts(read)
    elif family is Family.QWEN3_MOE:
        moe = qwen3_experts(read)
    return {
        "num_query_groups": read.number("num_key_value_heads", **groups),
        "head_dim": read.number("head_dim") if family is Family.QWEN3 else _head_dim(read, heads),
        "rope_scaling_factor": _llama3_factor(read),
        "qkv_bias": family is Family.QWEN2,
        "qk_norm": family in (Family.QWEN3, Family.QWEN3_MOE),
        "sliding_window": _sliding_window(read, family),
        "mla": None,
        "moe": moe,
    }


def _sliding_window(read: Entries, family: Family) -> Any:
    """The window of Mistral and Mixtral; the other families have none, or refuse the key that would use it."""
    types = read.content.get("layer_types")
    full = isinstance(types, list) and all(each == "full_attention" for each in types)
    if family is not Family.LLAMA and types is not None and not full:
        raise ConfigError(
            f"{read.file}: layer_types must be 'full_attention' in every layer to be built here, got {types!r}"
        )
    if family is Family.MISTRAL and "sliding_window" not in read.content:
        return 4096  # the default of transformers
    if family in (Family.MISTRAL, Family.MIXTRAL):
        return read.number("sliding_window", default=None)
    return None


def _head_dim(read: Entries, heads: Any) -> Any:
    """The width of a head; without it the hidden size over the heads."""
    if read.content.get("head_dim") is not None:
        return read.number("head_dim")
    hidden = read.number("hidden_size")
    if heads < 1 or hidden % heads:
        raise ConfigError(
            f"{read.file}: hidden_size must be a multiple of num_attention_heads={heads} without head_dim, got {hidden}"
        )
    return hidden // heads


def _llama3_factor(read: Entries) -> float | None:
    scaling = read.rope_scaling("llama3")
    if scaling is None:
        return None
    for key, built in _LLAMA3.items():
        if not _is_same(scaling.get(key, built), built):
            raise ConfigError(
                f"{read.file}: rope_scaling.{key} must be {built} to be built here, got {scaling[key]!r}"
            )
    return float(read.number("factor", scaling, "rope_scaling."))


def _deepseek(read: Entries) -> dict[str, Any]:
    heads = read.number("num_attention_heads")
    if (groups := read.number("num_key_value_heads", default=heads)) != heads:
        raise ConfigError(
            f"{read.file}: num_key_value_heads must be num_attention_heads={heads} with latent attention, got {groups}"
        )
    nope, rope = read.number("qk_nope_head_dim"), read.number("qk_rope_head_dim")
    mla = {
        "q_lora_rank": read.number("q_lora_rank", default=None),
        "kv_lora_rank": read.number("kv_lora_rank"),
        "qk_head_dim": nope,
        "qk_pos_emb_head_dim": rope,
        "v_head_dim": read.number("v_head_dim"),
        "yarn": _yarn(read),
    }
    return {
        "num_query_groups": heads,
        "head_dim": nope + rope,
        "rope_scaling_factor": None,
        "qkv_bias": False,
        "qk_norm": False,
        "sliding_window": None,
        "mla": mla,
        "moe": _moe(read),
    }


def _yarn(read: Entries) -> dict[str, Any] | None:
    scaling = read.rope_scaling("yarn")
    if scaling is None:
        return None
    return {
        "factor": float(read.number("factor", scaling, "rope_scaling.")),
        "original_length": read.number(
            "original_max_position_embeddings", scaling, "rope_scaling."
        ),
        "beta_fast": float(read.number("beta_fast", scaling, "rope_scaling.", 32) or 32),
        "beta_slow": float(read.number("beta_slow", scaling, "rope_scaling.", 1) or 1),
        "mscale": float(read.number("mscale", scaling, "rope_scaling.", 1) or 1),
        "mscale_all_dim": float(read.number("mscale_all_dim", scaling, "rope_scaling.", 0)),
    }


def _moe(read: Entries) -> dict[str, Any] | None:
    content = read.content
    if content.get("n_routed_experts") is None:
        return None
    coefficient = float(read.number("aux_loss_alpha", default=0))
    over = AuxLoss.sequence if read.flag("seq_aux", True) else AuxLoss.batch
    return {
        "num_experts": read.number("n_routed_experts"),
        "top_k": read.number("num_experts_per_tok"),
        "expert_ffn_hidden_size": read.number("moe_intermediate_size"),
        "num_shared_experts": read.number("n_shared_experts", default=0),
        "num_dense_layers": read.number("first_k_dense_replace", default=0),
        "norm_topk_prob": read.flag("norm_topk_prob", False),
        "routed_scaling_factor": float(read.number("routed_scaling_factor", default=1)),
        "aux_loss": (over if coefficient else AuxLoss.none).name,
        "aux_loss_coefficient": coefficient,
    }


def config_json(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """The published form of a model's configuration; `numbers` converts it back.

    Args:
        model: a model of any supported family.
        dtype: torch's name for the dtype of its weights.
    """
    family = family_of(model)
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family.value,
        "torch_dtype": dtype,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": float(model.rotary_base),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **(_grouped_query_json(model, family) if model.mla is None else _deepseek_json(model)),
    }


def _grouped_query_json(model: ModelConfig, family: Family) -> dict[str, Any]:
    factor, moe = model.rope_scaling_factor, model.moe
    scaling = None if factor is None else {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    content = {"head_dim": model.head_dim, "rope_scaling": scaling, **_switches(model, family)}
    if moe is None:
        return content
    return {**content, **(qwen3_json(moe) if model.qk_norm else mixtral_json(moe))}


def _switches(model: ModelConfig, family: Family) -> dict[str, Any]:
    """The entries that say which biases and windows there are."""
    match family:
        case Family.LLAMA:
            return {"attention_bias": False, "mlp_bias": False}
        case Family.MISTRAL | Family.MIXTRAL:
            return {"sliding_window": model.sliding_window}
        case Family.QWEN2:
            return {"use_sliding_window": False}
        case _:
            return {"attention_bias": False, "use_sliding_window": False}


def _deepseek_json(model: ModelConfig) -> dict[str, Any]:
    mla, moe = model.mla, model.moe
    assert mla is not None
    yarn = mla.yarn
    scaling = yarn and {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }
    experts = moe and {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_ffn_hidden_size,
        "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": moe.num_dense_layers,
        "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "aux_loss_alpha": moe.aux_loss_coefficient,
        "seq_aux": moe.aux_loss is AuxLoss.sequence,
    }
    return {
        "attention_bias": False,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_head_dim,
        "qk_rope_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_scaling": scaling,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        **(experts or {"n_routed_experts": None}),
    }
