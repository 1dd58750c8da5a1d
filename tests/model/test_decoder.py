"""The modules of a layer, against the published tensor shapes written out."""

from __future__ import annotations

import dataclasses

import pytest

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.model.decoder import (
    LinearShape,
    alike_layers,
    is_routed,
    layer_modules,
    linear_shapes,
    moe_of,
    other_parameters,
)
from quantexp.model.sizes import output_shape, shapes_by_layer
from quantexp.schema import ModelConfig


@pytest.fixture(scope="module")
def deepseek() -> ModelConfig:
    return compose(["model=deepseek2_lite"], None, {}).model


def test_routed_experts_are_named_by_the_first_and_the_last(deepseek: ModelConfig) -> None:
    wanted = (
        "modules must match one of q-proj, kv-down, kv-up, attention, proj, fc1, fc2, shared-fc1, shared-fc2, "
        "(attention-norm, kv-norm, mlp-norm, final-norm, )?(output, )?(residual, router, )?"
        "expert0-fc1 to expert63-fc2, got 'fc3'"
    )
    for words in (
        "quant.rules=[{modules: [fc3], format: bf16}]",
        "capture.rules=[{modules: [fc3], level: stats}]",
    ):
        with pytest.raises(ConfigError, match=wanted):
            compose(["model=deepseek2_lite", words], None, {})


def test_deepseeks_shapes_are_those_of_its_published_tensors(deepseek: ModelConfig) -> None:
    """From model.safetensors.index.json's tensors; gate_proj and up_proj are fc1 together."""
    published = {
        "q-proj": LinearShape(3072, 2048),
        "kv-down": LinearShape(576, 2048),
        "kv-up": LinearShape(4096, 512),
        "proj": LinearShape(2048, 2048),
    }
    dense = {"fc1": LinearShape(2 * 10944, 2048), "fc2": LinearShape(2048, 10944)}
    assert linear_shapes(deepseek, 0) == published | dense
    shapes = linear_shapes(deepseek, 26)
    assert {name: shapes[name] for name in published} == published
    assert shapes["shared-fc1"] == LinearShape(2 * 2816, 2048)
    assert shapes["shared-fc2"] == LinearShape(2048, 2816)
    for expert in range(64):
        assert shapes[f"expert{expert}-fc1"] == LinearShape(2 * 1408, 2048)
        assert shapes[f"expert{expert}-fc2"] == LinearShape(2048, 1408)
    assert len(shapes) == 4 + 2 + 2 * 64


def test_modules_come_in_the_order_of_the_forward_pass(deepseek: ModelConfig) -> None:
    names = list(layer_modules(deepseek, 1))
    assert names[:8] == [
        *("q-proj", "kv-down", "kv-up", "attention", "proj"),
        *("shared-fc1", "shared-fc2", "expert0-fc1"),
    ]
    assert layer_modules(deepseek, 1)["attention"] is None


def test_queries_with_a_latent_have_two_projections() -> None:
    words = ["model=deepseek2_lite", "model.mla.q_lora_rank=1536"]
    model = compose(words, None, {}).model
    shapes = linear_shapes(model, 0)
    assert "q-proj" not in shapes
    assert shapes["q-down"] == LinearShape(1536, 2048)
    assert shapes["q-up"] == LinearShape(3072, 1536)
    assert other_parameters(model, 0) == 2 * 2048 + 512 + 1536


def test_norms_and_router_are_counted_beside_the_modules(deepseek: ModelConfig) -> None:
    assert other_parameters(deepseek, 0) == 2 * 2048 + 512
    assert other_parameters(deepseek, 1) == 2 * 2048 + 512 + 64 * 2048


def test_only_the_first_layer_is_dense(deepseek: ModelConfig) -> None:
    assert [moe_of(deepseek, layer) is None for layer in range(3)] == [True, False, False]


def test_experts_without_shared_ones_have_no_shared_modules() -> None:
    model = compose(["model=deepseek2_lite", "model.moe.num_shared_experts=0"], None, {}).model
    names = layer_modules(model, 1)
    assert "expert0-fc1" in names
    assert not any(name.startswith("shared") for name in names)


def test_routed_modules_are_recognised_by_their_names() -> None:
    assert is_routed("expert63-fc2")
    assert not any(map(is_routed, ("shared-fc1", "fc1", "expert", "expert1", "attention")))


@pytest.mark.parametrize(
    ("words", "alike"),
    [
        (["model=deepseek2_lite"], [(0, 1), (1, 26)]),
        (["model=deepseek2_lite", "model.moe.num_dense_layers=0"], [(0, 27)]),
        (["model=deepseek2_lite", "model.moe.num_dense_layers=3"], [(0, 3), (3, 24)]),
        (["model=llama32-1b"], [(0, 16)]),
    ],
)
def test_layers_that_are_alike_are_counted(words: list[str], alike: list[tuple[int, int]]) -> None:
    model = compose(words, None, {}).model
    assert alike_layers(model) == alike
    layers = range(model.num_layers)
    *of_layers, beside = shapes_by_layer(model)
    assert of_layers == [linear_shapes(model, layer) for layer in layers]
    assert beside == {"output": output_shape(model)}


def test_one_layer_of_a_model_with_more_dense_ones_is_dense(deepseek: ModelConfig) -> None:
    assert alike_layers(dataclasses.replace(deepseek, num_layers=1)) == [(0, 1)]
