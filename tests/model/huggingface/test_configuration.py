"""config.json against the shipped models, in both directions, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quantexp.config.compose import compose
from quantexp.config.load import plain
from quantexp.config.sweep.points import compose_points
from quantexp.errors import ConfigError
from quantexp.model.huggingface.configuration import config_json, numbers, read_config
from quantexp.schema import ModelConfig
from tests.model.huggingface.published import DEEPSEEK, FAMILIES, LLAMA31

#: meta-llama/Llama-3.2-1B, config.json: the entries that determine the model.
PUBLISHED_LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
#: meta-llama/Llama-3.1-8B, which names no head_dim.
PUBLISHED_LLAMA31 = {
    **{key: value for key, value in PUBLISHED_LLAMA32.items() if key != "head_dim"},
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "rope_scaling": {**LLAMA31["rope_scaling"], "factor": 8.0},
    "tie_word_embeddings": False,
}
#: deepseek-ai/DeepSeek-V2-Lite.
PUBLISHED_DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
FILE = Path("config.json")


def shipped(name: str) -> ModelConfig:
    return compose([f"model={name}"], None, {}).model


def as_numbers(model: ModelConfig) -> dict[str, Any]:
    """The model as plain values, like those of `numbers`."""
    experiment = compose([], None, {})
    experiment.model = model
    content: dict[str, Any] = plain(experiment)["model"]
    return {key: v for key, v in content.items() if key not in ("name", "from_hf", "init_from")}


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama32-1b", PUBLISHED_LLAMA32),
        ("llama31-8b", PUBLISHED_LLAMA31),
        ("deepseek2_lite", PUBLISHED_DEEPSEEK),
    ],
)
def test_published_configuration_is_the_shipped_model(name: str, published: dict[str, Any]) -> None:
    assert numbers(published, FILE) == as_numbers(shipped(name))


@pytest.mark.parametrize("name", ["llama32-1b", "llama31-8b", "deepseek2_lite"])
def test_written_configuration_gives_the_model_back(name: str) -> None:
    model = shipped(name)
    assert numbers(config_json(model, "bfloat16"), FILE) == as_numbers(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_writes_the_same_model(family: str, tmp_path: Path) -> None:
    """Version 5 stores the rotary embedding's numbers in another place than published files do."""
    from transformers import AutoConfig

    content = dict(FAMILIES[family])
    AutoConfig.for_model(content.pop("model_type"), **content).save_pretrained(tmp_path)
    stored = read_config(tmp_path)
    assert "rope_parameters" in stored
    assert numbers(stored, FILE) == numbers(FAMILIES[family], FILE)


@pytest.mark.parametrize("name", ["llama32-1b", "llama31-8b", "deepseek2_lite"])
def test_transformers_reads_the_written_configuration(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(config_json(shipped(name), "bfloat16")))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    expected = as_numbers(shipped(name))
    if expected["moe"]:  # transformers has no balancing loss for this family
        expected["moe"] |= {"aux_loss": "none", "aux_loss_coefficient": 0.0}
    actual = numbers(read_config(tmp_path / "again"), FILE)
    if actual["moe"]:
        actual["moe"] |= {"aux_loss": "none", "aux_loss_coefficient": 0.0}
    assert actual == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
            r"of model_type 'gemma' \(GemmaForCausalLM\), which is not built here; built are llama \(Ll",
        ),
        ({}, r"of model_type None \(none named\)"),
        (
            {**LLAMA31, "attention_bias": True},
            "attention_bias must be False to be built here, got True",
        ),
        (
            {**LLAMA31, "hidden_act": "gelu"},
            "hidden_act must be 'silu' to be built here, got 'gelu'",
        ),
        ({**LLAMA31, "hidden_size": None}, "hidden_size must be a number, got None"),
        ({**LLAMA31, "vocab_size": "many"}, "vocab_size must be a number, got 'many'"),
        (
            {**LLAMA31, "rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling must be of type llama3 or none to be built here, got 'linear'",
        ),
        (
            {**LLAMA31, "rope_scaling": {**LLAMA31["rope_scaling"], "low_freq_factor": 2.0}},
            r"rope_scaling\.low_freq_factor must be 1\.0 to be built here, got 2\.0",
        ),
        (
            {**LLAMA31, "rope_scaling": {"rope_type": "llama3"}},
            r"rope_scaling\.factor must be a number, got None",
        ),
        (
            {**DEEPSEEK, "topk_method": "group_limited_greedy"},
            "topk_method must be 'greedy' to be built here, got 'group_limited_greedy'",
        ),
        (
            {**DEEPSEEK, "num_key_value_heads": 1},
            "num_key_value_heads must be num_attention_heads=3 with latent attention, got 1",
        ),
    ],
)
def test_unsupported_configuration_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        numbers(config, FILE)


def test_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing; give a model's config\.json"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json, line 1: .*; give a model's config\.json"):
        read_config(file)
    file.write_text("[]")
    with pytest.raises(
        ConfigError, match=r"config\.json: it must be keys with values, got a list; give a m"
    ):
        read_config(file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "My model_2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DEEPSEEK))
    return folder


def test_all_numbers_of_a_run_are_the_published_ones(folder: Path) -> None:
    model = compose([f"model.from_hf='{folder}'", "training.seq_length=64"], None, {}).model
    expected = numbers(DEEPSEEK, FILE)
    assert as_numbers(model) == expected
    assert model.name == "My-model_2"
    from_file = compose(
        [f"model.from_hf='{folder}/config.json'", "training.seq_length=64"], None, {}
    )
    assert as_numbers(from_file.model) == expected


def test_explicit_values_win_over_the_published_ones(folder: Path) -> None:
    words = [
        f"model.from_hf='{folder}'",
        "training=fast",
        "model.init_std=0.5",
        "model.mla.yarn=null",
    ]
    model = compose([*words, "model.name=other"], None, {}).model
    assert (model.num_layers, model.init_std, model.name) == (2, 0.5, "other")
    assert model.mla is not None
    assert model.mla.yarn is None


def test_own_model_file_may_name_a_published_model_and_change_it(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    own = f"name: mine\nfrom_hf: '{folder}'\nnorm_epsilon: 1e-3\nnum_layers: 5\n"
    (tmp_path / "model" / "mine.yaml").write_text(own)
    model = compose(["model=mine", "training.seq_length=64"], tmp_path, {}).model
    assert (model.name, model.norm_epsilon, model.num_layers) == ("mine", 1e-3, 5)
    assert model.hidden_size == DEEPSEEK["hidden_size"]
    assert compose(["model=mine", "training=fast"], tmp_path, {}).model.num_layers == 2


def test_points_of_a_sweep_may_have_published_models(folder: Path) -> None:
    words = [f"model.from_hf='{folder}'", "training.seq_length=64,128", "model.mla.v_head_dim=16"]
    models = [point.experiment.model for point in compose_points(words, None, {})]
    assert [(m.num_layers, m.mla and m.mla.v_head_dim) for m in models] == [(3, 16)] * 2


def test_two_choices_of_a_model_are_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model=llama31-8b and model\.from_hf=.* both choose the model; dr"
    ):
        compose([f"model.from_hf='{folder}'", "model=llama31-8b"], None, {})


def test_sequence_longer_than_the_published_models_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"seq_length must be at most model\.max_sequence_length=640, got 4096"
    ):
        compose([f"model.from_hf='{folder}'"], None, {})


def test_number_of_the_wrong_kind_is_named_by_its_key(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**DEEPSEEK, "hidden_size": 60.5}))
    with pytest.raises(
        ConfigError, match=r"model\.hidden_size must be a whole number, got '60\.5'"
    ):
        compose([f"model.from_hf='{folder}'"], None, {})


def test_every_field_of_the_model_is_published_or_ours() -> None:
    """A new number of ModelConfig must be read from config.json too."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields == {*numbers(LLAMA31, FILE), "name", "from_hf", "init_from"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {**LLAMA31, "architectures": []},
            r"architectures must be \['LlamaForCausalLM'\] to be built here, got \[\]",
        ),
        ({**LLAMA31, "architectures": 3}, "architectures must be .* got 3"),
        (
            {"model_type": ["llama"], "architectures": 3},
            r"of model_type \['llama'\] \(none named\)",
        ),
        ({**LLAMA31, "rope_scaling": 3}, "rope_scaling must be a JSON object or null, got 3"),
        ({**LLAMA31, "rope_parameters": []}, "rope_parameters must be a JSON object or null"),
        (
            {**LLAMA31, "auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
            "auto_map must be None to be built here, got {'AutoModelForCausalLM': 'mine.Mine'}",
        ),
        ({**DEEPSEEK, "auto_map": {"AutoModel": "a.B"}}, "auto_map must be None to be built"),
        ({**LLAMA31, "quantization_config": {"bits": 4}}, "quantization_config must be None"),
        (
            {**LLAMA31, "tie_word_embeddings": "false"},
            "tie_word_embeddings must be true or false, got 'false'",
        ),
        ({**LLAMA31, "attention_bias": 0}, "attention_bias must be False to be built here, got 0"),
        ({**LLAMA31, "num_key_value_heads": "2"}, "num_key_value_heads must be a number, got '2'"),
        ({**LLAMA31, "rope_theta": 10000.5}, "rope_theta must be a whole number to be built"),
        ({**LLAMA31, "rope_theta": float("inf")}, r"rope_theta must be below 1e\+18, got inf"),
        (
            {**LLAMA31, "head_dim": None, "hidden_size": 61},
            "hidden_size must be a multiple of num_attention_heads=6 without head_dim, got 61",
        ),
        ({**DEEPSEEK, "norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ],
)
def test_entry_of_a_wrong_type_or_kind_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        numbers(config, FILE)


def test_code_of_deepseeks_published_configuration_is_ignored() -> None:
    code = {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModel": "modeling_deepseek.DeepseekV2Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    }
    assert numbers({**DEEPSEEK, "auto_map": code}, FILE) == numbers(DEEPSEEK, FILE)
