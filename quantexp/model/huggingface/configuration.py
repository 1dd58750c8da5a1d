"""Converts between a published config.json and `ModelConfig`.

Every entry that affects a model's numbers is either a number of `ModelConfig` or must have the fixed value of the model
family. Any other value in a config.json is refused, so that a model is never merely similar to the published one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantexp.errors import ConfigError
from quantexp.schema import AuxLoss, ModelConfig

Json = Mapping[str, Any]

LLAMA, DEEPSEEK_V2 = "llama", "deepseek_v2"
#: Model type -> supported architecture.
ARCHITECTURES = {LLAMA: "LlamaForCausalLM", DEEPSEEK_V2: "DeepseekV2ForCausalLM"}
#: Fixed parameters of Megatron's Llama 3 scaling of rotary frequencies; only the factor is free.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: Required values; others would need code that does not exist.
_FIXED: dict[str, dict[str, tuple[object, ...]]] = {
    LLAMA: {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "attention_dropout": (0, None),
    },
    DEEPSEEK_V2: {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "attention_dropout": (0, None),
        "topk_method": ("greedy", None),
        "scoring_func": ("softmax", None),
        "n_group": (1, None),
        "moe_layer_freq": (1, None),
    },
}


def read_config(file: Path) -> dict[str, Any]:
    """The content of a config.json (or of the one in a folder).

    Raises:
        ConfigError: missing, or not a JSON object.
    """
    file = file / "config.json" if file.is_dir() else file
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); give a config.json"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is no JSON object; give a model's config.json")
    return content


def numbers(content: Json, file: Path) -> dict[str, Any]:
    """The keys of `ModelConfig`, except its name, that a published configuration determines.

    Raises:
        ConfigError: an unsupported architecture, or a missing or unsupported number.
    """
    kind = content.get("model_type")
    if kind not in ARCHITECTURES:
        architecture = ", ".join(map(str, content.get("architectures") or ["none named"]))
        known = ", ".join(f"{name} ({a})" for name, a in ARCHITECTURES.items())
        raise ConfigError(
            f"{file} is of model_type {kind!r} ({architecture}), which is not built here; built are {known}"
        )
    for key, allowed in _FIXED[kind].items():
        if key in content and content[key] not in allowed:
            raise ConfigError(
                f"{file}: {key} must be {allowed[0]!r} to be built here, got {content[key]!r}"
            )
    read = _Reader(content, file)
    common = {
        "num_layers": read.number("num_hidden_layers"),
        "hidden_size": read.number("hidden_size"),
        "ffn_hidden_size": read.number("intermediate_size"),
        "num_attention_heads": read.number("num_attention_heads"),
        "vocab_size": read.number("vocab_size"),
        "max_sequence_length": read.number("max_position_embeddings"),
        "norm_epsilon": read.number("rms_norm_eps"),
        "tie_embeddings": bool(content.get("tie_word_embeddings", False)),
        "init_std": content.get("initializer_range", 0.02),
        "rotary_base": round(read.rope_theta()),
    }
    return {**common, **(_llama(read) if kind == LLAMA else _deepseek(read))}


def _llama(read: _Reader) -> dict[str, Any]:
    heads = read.number("num_attention_heads")
    return {
        "num_query_groups": read.content.get("num_key_value_heads") or heads,
        "head_dim": read.content.get("head_dim") or read.number("hidden_size") // heads,
        "rope_scaling_factor": _llama3_factor(read),
        "mla": None,
        "moe": None,
    }


def _llama3_factor(read: _Reader) -> float | None:
    scaling = read.rope_scaling("llama3")
    if scaling is None:
        return None
    for key, built in _LLAMA3.items():
        if scaling.get(key, built) != built:
            raise ConfigError(
                f"{read.file}: rope_scaling.{key} must be {built} to be built here, got {scaling[key]}"
            )
    return float(read.number("factor", scaling, "rope_scaling."))


def _deepseek(read: _Reader) -> dict[str, Any]:
    heads = read.number("num_attention_heads")
    if (groups := read.content.get("num_key_value_heads") or heads) != heads:
        raise ConfigError(
            f"{read.file}: num_key_value_heads must be num_attention_heads={heads} with latent attention, got {groups}"
        )
    nope, rope = read.number("qk_nope_head_dim"), read.number("qk_rope_head_dim")
    mla = {
        "q_lora_rank": read.content.get("q_lora_rank"),
        "kv_lora_rank": read.number("kv_lora_rank"),
        "qk_head_dim": nope,
        "qk_pos_emb_head_dim": rope,
        "v_head_dim": read.number("v_head_dim"),
        "yarn": _yarn(read),
    }
    groups_and_heads = {"num_query_groups": heads, "head_dim": nope + rope}
    return {**groups_and_heads, "rope_scaling_factor": None, "mla": mla, "moe": _moe(read)}


def _yarn(read: _Reader) -> dict[str, Any] | None:
    scaling = read.rope_scaling("yarn")
    if scaling is None:
        return None
    return {
        "factor": float(read.number("factor", scaling, "rope_scaling.")),
        "original_length": read.number(
            "original_max_position_embeddings", scaling, "rope_scaling."
        ),
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        "mscale": float(scaling.get("mscale") or 1),
        "mscale_all_dim": float(scaling.get("mscale_all_dim") or 0),
    }


def _moe(read: _Reader) -> dict[str, Any] | None:
    content = read.content
    if content.get("n_routed_experts") is None:
        return None
    coefficient = float(content.get("aux_loss_alpha") or 0)
    over = AuxLoss.sequence if content.get("seq_aux", True) else AuxLoss.batch
    return {
        "num_experts": read.number("n_routed_experts"),
        "top_k": read.number("num_experts_per_tok"),
        "expert_ffn_hidden_size": read.number("moe_intermediate_size"),
        "num_shared_experts": content.get("n_shared_experts") or 0,
        "num_dense_layers": content.get("first_k_dense_replace") or 0,
        "norm_topk_prob": bool(content.get("norm_topk_prob", False)),
        "routed_scaling_factor": float(content.get("routed_scaling_factor") or 1),
        "aux_loss": (over if coefficient else AuxLoss.none).name,
        "aux_loss_coefficient": coefficient,
    }


class _Reader:
    """Typed access to a config.json with clear errors; files may store rotary parameters in an old or a new place."""

    def __init__(self, content: Json, file: Path) -> None:
        self.content, self.file = content, file
        parameters = content.get("rope_parameters")
        self.rope: Json = parameters if isinstance(parameters, dict) else {}

    def number(self, key: str, content: Json | None = None, where: str = "") -> Any:
        """A required number."""
        value = (self.content if content is None else content).get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.file}: {where}{key} must be a number, got {value!r}")
        return value

    def rope_theta(self) -> float:
        """The base period of the rotary embedding."""
        here = self.rope if "rope_theta" in self.rope else self.content
        return float(self.number("rope_theta", here))

    def rope_scaling(self, built: str) -> Json | None:
        """The scaling of rotary frequencies; None if there is none."""
        scaling = self.rope or self.content.get("rope_scaling")
        if not isinstance(scaling, dict):
            return None
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return None
        if kind != built:
            raise ConfigError(
                f"{self.file}: rope_scaling must be of type {built} or none to be built here, got {kind!r}"
            )
        return scaling


def config_json(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """The published form of a model's configuration; `numbers` converts it back.

    Args:
        model: a model of any supported family.
        dtype: torch's name for the dtype of its weights.
    """
    kind = LLAMA if model.mla is None and model.moe is None else DEEPSEEK_V2
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
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
        "attention_bias": False,
        "attention_dropout": 0.0,
        **(_llama_json(model) if kind == LLAMA else _deepseek_json(model)),
    }


def _llama_json(model: ModelConfig) -> dict[str, Any]:
    factor = model.rope_scaling_factor
    scaling = None if factor is None else {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return {"head_dim": model.head_dim, "mlp_bias": False, "rope_scaling": scaling}


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
