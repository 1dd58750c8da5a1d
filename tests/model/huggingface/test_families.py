"""config.json of Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE: sizes, both directions, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantexp.cli.plan_record import make_plan
from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.model.huggingface.configuration import config_json, numbers, read_config
from quantexp.model.huggingface.families import ARCHITECTURES, Family, family_of
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.sizes import num_padding_parameters, num_parameters
from tests.model.huggingface.published import (
    DEEPSEEK,
    FAMILIES,
    LLAMA31,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    as_model,
)
from tests.model.huggingface.published_configs import (
    MISTRAL_7B,
    MIXTRAL_8X7B,
    QWEN3_8B,
    QWEN3_30B,
    QWEN25_05B,
)

FILE = Path("config.json")
#: config.json, tensors, parameters: as in the safetensors files.
PUBLISHED = {
    "mistral": (MISTRAL_7B, 291, 7_241_732_096),
    "qwen2": (QWEN25_05B, 290, 494_032_768),
    "qwen3": (QWEN3_8B, 399, 8_190_735_360),
    "mixtral": (MIXTRAL_8X7B, 995, 46_702_792_704),
    "qwen3_moe": (QWEN3_30B, 18_867, 30_532_122_624),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_models_have_the_published_tensors(family: str) -> None:
    config, tensors, parameters = PUBLISHED[family]
    model = as_model(config)
    table = mapping(model)
    assert family_of(model).value == family
    assert len(published(table)) == tensors
    assert num_parameters(model) == parameters
    num_elements = sum(p.shape[0] * (p.width or 1) for p in table)
    assert num_elements == parameters + num_padding_parameters(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_written_configuration_gives_the_small_models_back(family: str) -> None:
    model = as_model(FAMILIES[family])
    written = config_json(model, "bfloat16")
    assert numbers(written, FILE) == numbers(FAMILIES[family], FILE)
    assert written["model_type"] == FAMILIES[family]["model_type"]
    assert written["architectures"] == [ARCHITECTURES[Family(written["model_type"])]]


@pytest.mark.parametrize("family", PUBLISHED)
def test_written_configuration_gives_the_published_models_back(family: str) -> None:
    config, _, _ = PUBLISHED[family]
    assert numbers(config_json(as_model(config), "bfloat16"), FILE) == numbers(config, FILE)


@pytest.mark.parametrize("family", PUBLISHED)
def test_transformers_reads_the_written_configuration(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config, _, _ = PUBLISHED[family]
    written = config_json(as_model(config), "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(written))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert numbers(read_config(tmp_path / "again"), FILE) == numbers(config, FILE)


def test_a_mistral_without_a_window_is_llamas_architecture() -> None:
    content = numbers({**MISTRAL, "sliding_window": None}, FILE)
    assert content == numbers({**MISTRAL, "model_type": "llama"}, FILE)
    model = as_model({**MISTRAL, "sliding_window": None})
    assert config_json(model, "bfloat16")["model_type"] == "llama"


def test_a_mistral_that_names_no_window_has_that_of_transformers() -> None:
    content = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert numbers(content, FILE)["sliding_window"] == 4096


def test_first_layers_without_experts_are_dense() -> None:
    moe = as_model({**QWEN3_MOE, "mlp_only_layers": [0]}).moe
    assert moe is not None
    assert moe.num_dense_layers == 1
    missing = {key: value for key, value in QWEN3_MOE.items() if key != "mlp_only_layers"}
    assert numbers(missing, FILE) == numbers(QWEN3_MOE, FILE)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**MISTRAL, "sliding_window": "4096"}, "sliding_window must be a number, got '4096'"),
        ({**MISTRAL, "attention_bias": True}, "attention_bias must be False to be built here"),
        (
            {**MISTRAL, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling must be of type llama3 or none to be built here, got 'yarn'",
        ),
        ({**MISTRAL, "num_key_value_heads": None}, "num_key_value_heads must be a number, got No"),
        (
            {**MISTRAL, "layer_types": ["sliding_attention"] * 2},
            r"layer_types must be 'full_attention' in every layer to be built here, got \['sliding_a",
        ),
        ({**MISTRAL, "layer_types": 3}, "layer_types must be 'full_attention' in every .* got 3"),
        ({**QWEN2, "use_sliding_window": True}, "use_sliding_window must be False to be built"),
        ({**QWEN3, "use_sliding_window": True}, "use_sliding_window must be False to be built"),
        ({**QWEN3, "attention_bias": True}, "attention_bias must be False to be built here"),
        ({**QWEN3, "head_dim": None}, "head_dim must be a number, got None"),
        (
            {**QWEN3, "architectures": ["Qwen2ForCausalLM"]},
            r"architectures must be \['Qwen3ForCausalLM'\] to be built here, got \['Qwen2",
        ),
        ({**MIXTRAL, "output_router_logits": True}, "output_router_logits must be False to be bu"),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise must be 0 to be built here"),
        (
            {**MIXTRAL, "num_experts_per_tok": 1},
            "num_experts_per_tok must be at least 2 to be built here, got 1: the normalised weight of",
        ),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts must be a number, got None"),
        ({**QWEN3_MOE, "use_sliding_window": True}, "use_sliding_window must be False to be bu"),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step must be 1 to be built here"),
        (
            {**QWEN3_MOE, "mlp_only_layers": [1]},
            r"mlp_only_layers must be the first layers \(\[\], \[0\], \[0, 1\], \.\.\.\) to be built here, got \[1\]",
        ),
        ({**QWEN3_MOE, "mlp_only_layers": 1}, r"mlp_only_layers must be the first layers .* got 1"),
        ({**QWEN3_MOE, "norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        (
            {**LLAMA31, "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]},
            r"of model_type 'qwen2_moe' \(Qwen2MoeForCausalLM\), which is not built here; built are llama \(Lla"
            r".*, qwen3_moe \(Qwen3MoeForCausalLM\), deepseek_v2 \(DeepseekV2ForCausalLM\)",
        ),
    ],
)
def test_entry_that_would_change_the_numbers_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        numbers(config, FILE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_planned_from_its_configuration(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family]))
    words = [f"model.from_hf={tmp_path}", "training.seq_length=32", "quant=FA_linear_mxfp4"]
    experiment = compose(words, None, {})
    plan = make_plan(experiment)
    assert plan.parameters == num_parameters(as_model(FAMILIES[family]))
    modules = {entry["module"] for entry in plan.precision_map}
    qkv = {"q-proj", "kv-down", "kv-up"} if FAMILIES[family] == DEEPSEEK else {"qkv"}
    assert qkv | {"attention", "proj"} <= modules


def test_sequence_longer_than_the_window_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    words = [f"model.from_hf={tmp_path}", "training.seq_length=42"]
    with pytest.raises(
        ConfigError,
        match=r"training\.seq_length must be at most model\.sliding_window=41, beyond which the model would need "
        "windowed attention, which is not built, got 42",
    ):
        compose(words, None, {})
    assert compose([*words[:1], "training.seq_length=41"], None, {}).model.sliding_window == 41
