from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantexp.config.compose import compose
from quantexp.errors import ConfigError, RunError
from quantexp.model.decoder import ATTENTION, linear_shapes
from quantexp.model.sizes import num_padding_parameters, num_parameters
from quantexp.quant.precision import ModuleId, precision_map
from quantexp.schema import Backend, Experiment
from quantexp.training.megatron.linear import SchemeColumnParallelLinear
from quantexp.training.megatron.model import build_model, scheme_modules, scheme_spec, set_precision
from quantexp.training.megatron.session import is_deterministic, session
from quantexp.training.megatron.specs import inject, stock_layer_spec, stock_spec
from quantexp.training.megatron.without_te import require_te

Tiny = Callable[..., Experiment]


def test_parameter_count_equals_the_built_models(tiny: Tiny) -> None:
    for tie in ("true", "false"):
        experiment = tiny(f"model.tie_embeddings={tie}")
        with session(experiment.training):
            model, _ = build_model(experiment.model, experiment.training, stock_layer_spec())
        counted = num_parameters(experiment.model) + num_padding_parameters(experiment.model)
        assert sum(p.numel() for p in model.parameters()) == counted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama31-8b", "llama32-1b", "deepseek2_lite"])
def test_shipped_models_have_the_published_shapes(name: str) -> None:
    """Builds the full model on the meta device, without memory for its tensors."""
    experiment = compose([f"model={name}"], None, {})
    with session(experiment.training), torch.device("meta"):
        spec = inject(stock_spec(experiment.model))
        model, _ = build_model(experiment.model, experiment.training, spec)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(experiment.model)
    modules = scheme_modules(model)
    assert modules.keys() == precision_map(experiment.model, experiment.quant).keys()
    for module, built in modules.items():
        if module.name != ATTENTION:
            shape = linear_shapes(experiment.model, module.layer)[module.name]
            assert built.weight.shape == (shape.output_width, shape.input_width), module


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.mla.q_lora_rank=24"],
        ["model.moe.num_shared_experts=0", "model.moe.num_dense_layers=0"],
        ["model.mla.yarn=null", "model.moe=null"],
    ],
    ids=str,
)
def test_other_configurations_of_deepseek2_are_counted_and_named(
    tiny: Tiny, tiny_models: dict[str, list[str]], overrides: list[str]
) -> None:
    experiment = tiny(*tiny_models["deepseek2_lite"], *overrides)
    with session(experiment.training):
        spec = inject(stock_spec(experiment.model))
        model, _ = build_model(experiment.model, experiment.training, spec)
    counted = num_parameters(experiment.model) + num_padding_parameters(experiment.model)
    assert sum(p.numel() for p in model.parameters()) == counted
    declared = precision_map(experiment.model, experiment.quant)
    assert scheme_modules(model).keys() == declared.keys()


def test_set_precision_sets_every_module_of_the_map(tiny: Tiny) -> None:
    experiment = tiny("quant=FA_linear_mxfp8")
    declared = precision_map(experiment.model, experiment.quant)
    with session(experiment.training):
        spec = inject(stock_layer_spec())
        model, _ = build_model(experiment.model, experiment.training, spec)
        set_precision(model, declared)
    modules = scheme_modules(model)
    assert modules.keys() == declared.keys()
    assert modules[ModuleId(1, "fc2")].precision is declared[ModuleId(1, "fc2")]


def test_a_model_without_the_maps_modules_is_rejected(tiny: Tiny) -> None:
    experiment = tiny()
    declared = precision_map(experiment.model, experiment.quant)
    with session(experiment.training):
        model, _ = build_model(experiment.model, experiment.training, inject(stock_layer_spec()))
        del declared[ModuleId(1, "fc2")]
        with pytest.raises(
            RuntimeError, match="has 10 scheme modules, but the precision map has 9"
        ):
            set_precision(model, declared)


def test_the_linear_layer_rejects_unsupported_features(tiny: Tiny) -> None:
    experiment = tiny()
    with session(experiment.training):
        model, _ = build_model(experiment.model, experiment.training, inject(stock_layer_spec()))
        set_precision(model, precision_map(experiment.model, experiment.quant))
        layer: Any = scheme_modules(model)[ModuleId(0, "qkv")]
        x = torch.zeros(4, 1, 128, dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match="do not support gradient-accumulation fusion"):
            layer._forward_impl(x, layer.weight, gradient_accumulation_fusion=True)
        with pytest.raises(ConfigError, match="for each product; got gtp_remat_size=2, which must"):
            layer._forward_impl(x, layer.weight, gtp_remat_size=2)
        with pytest.raises(TypeError, match="argument 'of_a_later_release'"):
            layer._forward_impl(x, layer.weight, of_a_later_release=True)


def test_attention_rejects_packed_sequences(tiny: Tiny) -> None:
    experiment = tiny()
    with session(experiment.training):
        model, _ = build_model(experiment.model, experiment.training, inject(stock_layer_spec()))
        attention = scheme_modules(model)[ModuleId(0, "attention")]
        x = torch.zeros(4, 1, 4, 32, dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match="supports neither packed sequences nor a bias"):
            attention(x, x, x, None, packed_seq_params=object())  # type: ignore[operator]


def test_the_session_leaves_nothing_behind(tiny: Tiny) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with session(tiny().training):
        assert torch.distributed.is_initialized()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.distributed.is_initialized()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_runs_are_deterministic_on_a_cpu_by_default(tiny: Tiny) -> None:
    assert is_deterministic(tiny().training) == (not torch.cuda.is_available())
    assert not is_deterministic(tiny("training.deterministic=false").training)
    assert is_deterministic(tiny("training.deterministic=true").training)


def test_the_emulation_needs_no_transformer_engine(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantexp.training.megatron.model.require_te", None)
    spec = scheme_spec(tiny().model)
    (qkv,) = {layer.submodules.self_attention.submodules.linear_qkv for layer in spec.layer_specs}
    assert qkv is SchemeColumnParallelLinear


@pytest.mark.parametrize("name", ["transformer_engine", "te_emulated"])
def test_transformer_engine_that_is_not_installed_is_named_with_the_remedy(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    experiment = tiny()
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(RunError) as caught:
        scheme_spec(experiment.model, Backend(name))
    assert str(caught.value) == (
        f"quant.backend={name} needs Transformer Engine, which is not installed: pip install 'quantexp[te]'"
    )


def test_transformer_engine_that_is_broken_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: object())
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(RunError) as caught:
        require_te("quant.backend=te_emulated")
    assert str(caught.value) == (
        "quant.backend=te_emulated needs Transformer Engine, which cannot be imported here (hidden earlier in this "
        "process): pip install 'quantexp[te]'"
    )
