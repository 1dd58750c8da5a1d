"""Megatron-LM's arguments become the keys of quantexp, and the scheme comes from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.extras.megatron_lm.described import experiment_of
from quantexp.quant.scheme import SCHEMES, content_hash
from quantexp.schema import CaptureLevel, Dispatcher, Precision
from tests.extras.megatron_lm.arguments import llama


def _scheme(value: str) -> Any:
    return experiment_of(llama(), {"QUANTEXP_QUANT": value}).quant


def test_a_llama_has_its_numbers() -> None:
    model = experiment_of(llama(), {"QUANTEXP_QUANT": "bf16"}).model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (2, 128, 192)
    assert (model.num_attention_heads, model.num_query_groups, model.head_dim) == (4, 2, 32)
    assert (model.vocab_size, model.tie_embeddings, model.moe, model.mla) == (
        5120,
        False,
        None,
        None,
    )


def test_the_norm_has_a_name_of_its_own_in_each_version() -> None:
    args = llama(norm_epsilon=1e-6)
    del args.layernorm_epsilon
    assert experiment_of(args, {"QUANTEXP_QUANT": "bf16"}).model.norm_epsilon == 1e-6


def test_samples_count_as_iterations() -> None:
    args = llama(train_iters=None, train_samples=40)
    assert experiment_of(args, {"QUANTEXP_QUANT": "bf16"}).training.iterations == 10


def test_a_mixture_with_latent_attention_has_its_numbers() -> None:
    args = llama(
        num_experts=4,
        moe_ffn_hidden_size=64,
        moe_shared_expert_intermediate_size=128,
        moe_layer_freq=[0, 1],
        moe_router_pre_softmax=True,
        multi_latent_attention=True,
        rope_type="yarn",
        rotary_scaling_factor=40.0,
        mscale=0.707,
        mscale_all_dim=0.707,
        q_lora_rank=None,
        kv_lora_rank=48,
        qk_head_dim=24,
        qk_pos_emb_head_dim=16,
        v_head_dim=24,
        world_size=4,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type="alltoall",
    )
    experiment = experiment_of(args, {"QUANTEXP_QUANT": "bf16"})
    moe, mla = experiment.model.moe, experiment.model.mla
    assert moe is not None
    assert mla is not None
    assert (moe.num_experts, moe.top_k, moe.num_shared_experts, moe.num_dense_layers) == (
        4,
        2,
        2,
        1,
    )
    assert not moe.norm_topk_prob
    assert (mla.kv_lora_rank, mla.v_head_dim) == (48, 24)
    assert mla.yarn is not None
    assert (mla.yarn.factor, mla.yarn.original_length) == (40.0, 4096)
    assert experiment.model.head_dim == 40
    assert experiment.parallel.expert == 2
    assert experiment.parallel.dispatcher is Dispatcher.alltoall


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme_is_the_shipped_one(scheme: str) -> None:
    assert content_hash(_scheme(scheme)) == content_hash(compose([f"quant={scheme}"]).quant)
    assert _scheme(scheme).name == scheme


def test_words_compose_a_scheme() -> None:
    words = "quant=FA_mxfp8 quant/pv=hifp8"
    assert content_hash(_scheme(words)) == content_hash(compose(words.split()).quant)


@pytest.mark.parametrize("folder", ["quant", "elsewhere"])
def test_a_file_is_a_scheme(folder: str, tmp_path: Path) -> None:
    file = tmp_path / folder / "mine.yaml"
    file.parent.mkdir()
    file.write_text("defaults: [linear: mxfp4, qk: none, pv: none]\n")
    own = _scheme(str(file))
    assert own.name == "mine"
    assert content_hash(own) == content_hash(compose(["quant=linear_mxfp4"]).quant)


def test_a_capture_is_off_unless_asked_for() -> None:
    variables = {"QUANTEXP_QUANT": "bf16"}
    assert experiment_of(llama(), variables).capture.level is CaptureLevel.off
    variables["QUANTEXP_CAPTURE"] = "capture=tensors capture.iterations=[2]"
    capture = experiment_of(llama(), variables).capture
    assert (capture.level, capture.iterations) == (CaptureLevel.tensors, ["2"])


def test_gradients_are_compared_by_the_aspects_that_are_named() -> None:
    scheme = {"QUANTEXP_QUANT": "FA_mxfp8"}
    assert not experiment_of(llama(), scheme).gradient.only
    gradient = experiment_of(llama(), {**scheme, "QUANTEXP_GRADIENT": "layer,slot"}).gradient
    assert (gradient.only, gradient.by) == (True, ["layer", "slot"])


@pytest.mark.parametrize(
    ("variables", "arguments", "words"),
    [
        (
            {"QUANTEXP_GRADIENT": "layers"},
            {},
            "QUANTEXP_GRADIENT must be among slot, .*, got 'layers'",
        ),
        (
            {"QUANTEXP_GRADIENT": "layer", "QUANTEXP_CAPTURE": "stats"},
            {},
            "QUANTEXP_GRADIENT captures nothing; unset QUANTEXP_CAPTURE",
        ),
        (
            {"QUANTEXP_GRADIENT": "layer"},
            {"te_precision_config_file": "modules.yaml"},
            "QUANTEXP_GRADIENT compares parts of one scheme; drop --te-precision-config-file",
        ),
    ],
    ids=["unknown", "capture", "file"],
)
def test_gradients_that_cannot_be_compared_are_refused(
    variables: dict[str, str], arguments: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment_of(llama(**arguments), {"QUANTEXP_QUANT": "FA_mxfp8", **variables})


def test_precision_and_layout_are_theirs() -> None:
    args = llama(bf16=False, fp16=True, tensor_model_parallel_size=2, world_size=4)
    experiment = experiment_of(args, {"QUANTEXP_QUANT": "bf16"})
    assert experiment.training.precision is Precision.fp16
    assert (experiment.parallel.tensor, experiment.parallel.sequence) == (2, False)
    assert experiment.launcher.num_processes == 4


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "QUANTEXP_QUANT is not set: set it to a scheme's name"),
        ({"QUANTEXP_QUANT": "FA_mxfp9"}, "Megatron-LM's arguments, or the scheme: .*FA_mxfp9"),
        ({"QUANTEXP_QUANT": "no/such.yaml"}, "QUANTEXP_QUANT=no/such.yaml is no file; give the"),
        (
            {"QUANTEXP_QUANT": "quant=bf16 training.lr=1"},
            "QUANTEXP_QUANT must be a name, or words that begin with quant= or quant., got "
            "'training.lr=1'",
        ),
        (
            {"QUANTEXP_QUANT": "bf16", "QUANTEXP_CAPTURE": "quant=bf16"},
            "QUANTEXP_CAPTURE must be a name, or words that begin with capture=",
        ),
        (
            {"QUANTEXP_QUANT": "more/adam_fp8_block"},
            "QUANTEXP_QUANT=more/adam_fp8_block rounds the optimizer's moments",
        ),
    ],
    ids=lambda case: str(case)[:30],
)
def test_a_scheme_that_cannot_be_is_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment_of(llama(), variables)


def test_without_a_scheme_the_file_decides() -> None:
    args = llama(te_precision_config_file="modules.yaml")
    assert experiment_of(args, {}).quant.name == "bf16"
